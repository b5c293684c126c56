"""Stages 3 to 6, the weight sync: publish, then suspend, load and resume (RollArt, arXiv 2512.22560, section 6.2)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prefect import get_run_logger, task

from resources.engines.base import LoadReport
from resources.pools.actors import call, call_sync
from resources.pools.registry import RunActors, lookup_sync
from resources.runs import RunRef

GRACE_S = 30.0
"""The queue answers within the stage's timeout; this much more is granted to the call itself."""


@task(name="publish", tags=["pool:learner"])
def publish(run: RunRef, timeout_s: float) -> dict[str, Any]:
    """Write the learner's version to the weight store; engines prefetch it while they still serve the one before."""
    actors = lookup_sync(run.service_id)
    assert actors.learner is not None, f"run {run.run_id} has no learner"
    report = call_sync(actors.learner, "publish", timeout_s=timeout_s)
    asyncio.run(_on_all(_engines(actors), "prefetch", report["version"], timeout_s=timeout_s))
    return report


@task(name="switch-weights", tags=["pool:control"])
def switch_weights(run: RunRef, version: int, timeout_s: float) -> dict[str, Any]:
    """Every engine stops at its next decode step, switches to ``version`` and goes on; nothing that runs is lost.

    The gate learns of the new version between load and resume, so that whatever it evicts never generates again, and
    so that no generation of the next batch starts under the old weights. In the one-off pipeline all of this waits
    until the next batch is complete: the load comes between two batches.
    """
    actors = lookup_sync(run.service_id)
    waited_s = call_sync(
        actors.queue, "wait_loadable", version, load_timeout_s=timeout_s, timeout_s=timeout_s + GRACE_S
    )
    reports, suspended_s = asyncio.run(_switch(_engines(actors), actors.queue, version, timeout_s))
    get_run_logger().info("version %d is loaded on %d engines in %.3f s", version, len(reports), suspended_s)
    return {
        "weights/load_waited_s": waited_s,
        "weights/exposed_s": suspended_s,
        "weights/load_s": max(report.exposed_s for report in reports),
        "weights/total_s": max(report.total_s for report in reports),
        "weights/recomputed_tokens": sum(report.recomputed_tokens for report in reports),
    }


def _engines(actors: RunActors) -> list[Any]:
    return [engine for of_class in actors.engines.values() for engine in of_class]


async def _switch(engines: list[Any], queue: Any, version: int, timeout_s: float) -> tuple[list[LoadReport], float]:
    started = time.perf_counter()
    await _on_all(engines, "suspend", timeout_s=timeout_s)
    try:
        reports = await _on_all(engines, "load", version, timeout_s=timeout_s)
        await asyncio.wait_for(call(queue, "version_loaded", version), timeout_s)
    finally:
        # A load that failed leaves the old weights in place: engines go on with them while the run is being ended.
        await _on_all(engines, "resume", timeout_s=timeout_s)
    return reports, time.perf_counter() - started


async def _on_all(engines: list[Any], method: str, *args: Any, timeout_s: float) -> list[Any]:
    """The same call on every engine at once. Raises TimeoutError naming the method when one does not answer."""
    try:
        return await asyncio.wait_for(asyncio.gather(*(call(engine, method, *args) for engine in engines)), timeout_s)
    except TimeoutError as error:
        raise TimeoutError(
            f"{len(engines)} engines: {method}() was not answered by all within {timeout_s:g} s"
        ) from error
