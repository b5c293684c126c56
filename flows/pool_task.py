"""How does a Prefect task run in a worker of a pool, and how do its events and log lines reach the server?"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import cloudpickle
import distributed
from prefect.client.schemas.objects import State
from prefect.context import SettingsContext, serialize_context
from prefect.events.worker import EventsWorker
from prefect.logging import get_logger
from prefect.logging.handlers import APILogWorker
from prefect.task_engine import run_task_async, run_task_sync
from prefect.tasks import Task

HAND_IN_S = 3.0
"""Longest wait for a server to take the last events and log lines."""


@dataclass(frozen=True, slots=True)
class SerializedContext:
    """Prefect's run context as it travels to workers: the settings apart from the rest, for they seldom change."""

    settings: bytes
    rest: bytes

    @classmethod
    def take(cls) -> SerializedContext:
        """Serialise the context of the run that is under way."""
        context = serialize_context()
        settings = cloudpickle.dumps(context.pop("settings_context"))
        return cls(settings, cloudpickle.dumps(context))

    def restore(self) -> dict[str, Any]:
        """The context for Prefect's task engine, with settings that are built already."""
        return {**cloudpickle.loads(self.rest), "settings_context": _built_settings(self.settings)}


@functools.lru_cache(maxsize=4)
def _built_settings(serialized: bytes) -> dict[str, Any]:
    """Building settings takes 54 pydantic models; the bytes of one run's settings are the same for all its tasks."""
    built = SettingsContext(**cloudpickle.loads(serialized))
    return {"profile": built.profile, "settings": built.settings}


def run_pool_task(
    task: Task[Any, Any], context: SerializedContext, asset_context: dict[str, Any], **run: Any
) -> State[Any]:
    """Run one task in a worker and return its final state; the task's own errors are inside the state."""
    restored = {**context.restore(), "asset_context": asset_context}
    _report_to(restored["settings_context"]["settings"].api.url)
    _say_where(task, restored["flow_run_context"].get("flow_run"), run["task_run_id"])
    if task.isasync:
        return asyncio.run(run_task_async(task=task, context=restored, return_type="state", **run))  # type: ignore
    return run_task_sync(task=task, context=restored, return_type="state", **run)  # type: ignore


def _say_where(task: Task[Any, Any], flow_run: Mapping[str, Any] | None, task_run_id: UUID) -> None:
    """One line in the task run's log: on which worker it runs."""
    if flow_run is None:
        return
    run = {"flow_run_id": str(flow_run["id"]), "task_run_id": str(task_run_id), "task_run_name": task.name}
    get_logger("task_runs").info("%s runs on worker %s", task.name, distributed.get_worker().name, extra=run)


async def dask_teardown(worker: distributed.Worker) -> None:
    """Called by Dask when a worker that preloads this module closes: the end of the last task's log is handed in."""
    await asyncio.to_thread(hand_in_reports)


def hand_in_reports(timeout_s: float = HAND_IN_S) -> None:
    """Send the events and log lines that this process still holds (Prefect collects them for up to two seconds)."""
    # On a thread: Prefect hands a caller that is on an event loop something to await instead of waiting itself.
    threads = [
        threading.Thread(target=service.drain_all, kwargs={"timeout": timeout_s}, daemon=True)
        for service in (EventsWorker, APILogWorker)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout_s)


_reporting_to: list[str | None] = [None]


def _report_to(api_url: str | None) -> None:
    """Prefect's reporting threads keep the server that they were started for: a worker that outlives a run, on a
    standing cluster, must not report the next one to a server that is gone."""
    if _reporting_to[0] != api_url:
        hand_in_reports()
        _reporting_to[0] = api_url
