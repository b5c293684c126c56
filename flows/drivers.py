"""Which flow runs did a driver leave behind that was killed?

A driver that dies by SIGKILL cannot tell the server: its flow runs would stay "Running" in the history for ever. So
each notes itself in the state folder, and the next one there marks what dead drivers left as Crashed. So does
``python -m flows.drivers STATE_FOLDER``, which `make up` calls.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Crashed

from resources.runs import RunRef

FOLDER = "drivers"
UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.PAUSED, StateType.CANCELLING]


@contextmanager
def noted_driver(run: RunRef, state: Path) -> Iterator[None]:
    """Note the flow run that is under way in the state folder; first clear up behind drivers that are gone."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:  # called as plain Python: nothing to leave behind
        yield
        return
    for line in crash_orphans(state):
        get_run_logger().warning("%s", line)
    record = state / FOLDER / f"{context.flow_run.id}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    process = psutil.Process()
    record.write_text(
        json.dumps(
            {
                "run_id": run.run_id,
                "store": run.store_url,
                "flow_run_id": str(context.flow_run.id),
                "host": socket.gethostname(),
                "pid": process.pid,
                "started_at": process.create_time(),
            }
        )
    )
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


def crash_orphans(state: Path) -> list[str]:
    """Set the flow runs of dead drivers of this host, and all below them, to Crashed. Returns a line for each driver.

    A run that the server in use does not know is left to drivers that use another one.
    """
    lines = []
    for path in sorted((state / FOLDER).glob("*.json")):
        try:
            record: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # another driver writes or removes it this moment
        if record["host"] != socket.gethostname() or _lives(record):
            continue
        message = (
            f"driver {record['pid']} on {record['host']} was killed; resume the run with --resume {record['run_id']}"
        )
        try:
            with get_client(sync_client=True) as client:
                known = _crash(client, UUID(record["flow_run_id"]), message)
        except (PrefectHTTPStatusError, httpx.TransportError) as error:
            lines.append(f"the flow runs of run {record['run_id']} could not be set to Crashed: {error}")
            continue
        if known:
            path.unlink(missing_ok=True)
            lines.append(f"flow run {record['flow_run_id']} is set to Crashed: {message}")
    return lines


def _lives(record: dict[str, Any]) -> bool:
    """Whether the very process still runs: its number may belong to another one by now."""
    try:
        process = psutil.Process(record["pid"])
        is_same = abs(process.create_time() - record["started_at"]) < 1.0
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _crash(client: SyncPrefectClient, flow_run_id: UUID, message: str) -> bool:
    """Set what is unfinished of a flow run and of its subflows to Crashed. False when the server does not know it."""
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
    if not found:
        return False
    unfinished = FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED))
    children = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run_id]), state=unfinished
        )
    )
    # Children first: a driver that is killed here leaves the rest to the next one.
    for flow_run in [*children, *found]:
        if flow_run.state_type not in UNFINISHED:
            continue
        tasks = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id])),
            task_run_filter=TaskRunFilter(
                state=TaskRunFilterState(type=TaskRunFilterStateType(any_=UNFINISHED)),
            ),
        )
        for task_run in tasks:
            client.set_task_run_state(task_run.id, Crashed(message=message), force=True)
        client.set_flow_run_state(flow_run.id, Crashed(message=message), force=True)
    return True


def main(arguments: list[str]) -> None:
    """Clear up behind the dead drivers of a state folder, and say what was done."""
    for line in crash_orphans(Path(arguments[0])):
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
