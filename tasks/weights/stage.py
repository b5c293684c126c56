"""Stages 3 to 6, the weight sync: publish, then suspend, load and resume (RollArt, arXiv 2512.22560, section 6.2)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from prefect import get_run_logger, task

from resources.engines.base import LoadReport
from resources.failures import EngineFailure, InfrastructureFailure
from resources.pools.actors import call, call_sync
from resources.pools.registry import lookup_sync
from resources.runs import RunRef

GRACE_S = 30.0
"""The queue answers within the stage's timeout; this much more is granted to the call itself."""


@task(name="publish", tags=["pool:learner"])
def publish(run: RunRef, version: int, timeout_s: float) -> dict[str, Any]:
    """Write a version to the weight store; engines that will load it prefetch it while they still serve the one
    before."""
    actors = lookup_sync(run.service_id, max_age_s=0.0)
    assert actors.learner is not None, f"run {run.run_id} has no learner"
    report = call_sync(actors.learner, "publish", version, timeout_s=timeout_s)
    asyncio.run(
        _on_all(
            actors.engines_loading(version), "prefetch", version, timeout_s=timeout_s, warn=get_run_logger().warning
        )
    )
    return report


@task(name="switch-weights", tags=["pool:control"])
def switch_weights(run: RunRef, version: int, timeout_s: float) -> dict[str, Any]:
    """Every engine stops at its next decode step, switches to ``version`` and goes on; nothing that runs is lost. With
    cross-policy sampling the stale ones, unless the version is one that they load, go on undisturbed.

    The gate learns of the new version between load and resume, so that whatever it evicts never generates again, and
    so that no generation of the next batch starts under the old weights. In the one-off pipeline all of this waits
    until the next batch is complete: the load comes between two batches.
    """
    queue = lookup_sync(run.service_id, max_age_s=0.0).queue
    waited_s = call_sync(queue, "wait_loadable", version, load_timeout_s=timeout_s, timeout_s=timeout_s + GRACE_S)
    actors = lookup_sync(run.service_id, max_age_s=0.0)  # an engine may have been rebuilt meanwhile
    warn = get_run_logger().warning
    reports, suspended_s = asyncio.run(_switch(actors.engines_loading(version), actors.queue, version, timeout_s, warn))
    get_run_logger().info("version %d is loaded on %d engines in %.3f s", version, len(reports), suspended_s)
    return {
        "weights/load_waited_s": waited_s,
        "weights/exposed_s": suspended_s,
        "weights/load_s": max(report.exposed_s for report in reports),
        "weights/total_s": max(report.total_s for report in reports),
        "weights/recomputed_tokens": sum(report.recomputed_tokens for report in reports),
    }


async def _switch(
    engines: list[Any], queue: Any, version: int, timeout_s: float, warn: Callable[[str], None]
) -> tuple[list[LoadReport], float]:
    started = time.perf_counter()
    try:
        stopped = await _on_all(engines, "suspend", timeout_s=timeout_s, warn=warn)
        loaded = await _on_all(list(stopped), "load", version, timeout_s=timeout_s, warn=warn)
        await asyncio.wait_for(call(queue, "version_loaded", version), timeout_s)
    finally:
        # A load that failed leaves the old weights in place: engines go on with them while the run is being ended.
        await _on_all(engines, "resume", timeout_s=timeout_s, warn=warn)
    return list(loaded.values()), time.perf_counter() - started


async def _on_all(
    engines: list[Any], method: str, *args: Any, timeout_s: float, warn: Callable[[str], None]
) -> dict[Any, Any]:
    """The same call on every engine at once; answers by engine.

    An engine that fails is left out, as long as one is left: the run's supervisor rebuilds it, or lets it load the
    version in force.

    Raises:
        TimeoutError: one does not answer; names the method.
        InfrastructureFailure: every engine failed.
    """
    try:
        async with asyncio.timeout(timeout_s):
            answers = await asyncio.gather(*(call(engine, method, *args) for engine in engines), return_exceptions=True)
    except TimeoutError as error:
        raise TimeoutError(
            f"{len(engines)} engines: {method}() was not answered by all within {timeout_s:g} s"
        ) from error
    answered = {}
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, (InfrastructureFailure, EngineFailure)):
            warn(f"{engine} is left out of {method}(): {answer}")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            answered[engine] = answer
    if not answered:
        raise InfrastructureFailure(f"no engine is left to {method}(): {'; '.join(map(str, answers))}")
    return answered
