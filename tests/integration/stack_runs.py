"""Small runs of the real stack, and what the tests read of them: in the object store, and through Prefect's API."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    FlowRunFilterParentFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun

from flows.config import RunConfig
from resources.object_store import ObjectStore
from resources.runs import find_run, iterations
from resources.trajectories.batch import batch_versions, read_batch
from resources.trajectories.store import read_trajectories, run_dataset

STAGES = {
    "collect": "control-0",
    "update": "learner-0",
    "publish": "learner-0",
    "switch-weights": "control-0",
    "record": "control-0",
}
"""Stages of an iteration, and the worker that each belongs on."""
RECORDED_S = 60.0
"""Task runs and log lines reach the server as events, some time later."""


def small_fields(store: str | Path, name: str, **fields: Any) -> dict[str, Any]:
    """A run file: all four families, groups of four, a warm start of two steps, every version kept.

    So young a policy never ends a turn by itself; with ``length_finish: step`` its episodes have several turns all the
    same.
    """
    common = {"groups_per_iteration": 1, "group_size": 4, "max_new_tokens": 8}
    families = {
        "frozen_lake": {"environment": "frozen_lake", "hardware_class": "compute"},
        "guess_number": {"environment": "guess_number", "hardware_class": "bandwidth"},
        "calculator": {"environment": "calculator", "hardware_class": "bandwidth", "scorer": "exact_answer"},
        "code_repair": {"environment": "code_repair", "hardware_class": "compute", "scorer": "unit_tests"},
    }
    families["guess_number"] |= {"groups_per_iteration": 2}
    return {
        "name": name,
        "store": str(store),
        "num_iterations": 3,
        "warm_start": {"num_steps": 2},
        "evaluation": {"num_episodes": 8},
        "checkpoint_keep": 100,
        "pools": {"start_timeout_s": 240},
        "families": {family: common | own for family, own in families.items()},
        "rollout": {"length_finish": "step"},
        **fields,
    }


def small_config(store: str | Path, name: str, **fields: Any) -> RunConfig:
    return RunConfig.model_validate(small_fields(store, name, **fields))


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float, poll_s: float = 0.2) -> Any:
    """The first true answer of ``condition``. Fails naming ``what`` after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(poll_s)
    return answer


# -- in the store --------------------------------------------------------------------------------------------------


def recorded_iterations(store_url: str | Path, run_id: str = "latest") -> list[int]:
    """Completed iterations of a run that may not exist yet."""
    root = ObjectStore.open(str(store_url))
    if run_id == "latest" and not root.exists("latest_run.json"):
        return []
    return iterations(find_run(str(store_url), run_id))


def trained_groups(store: ObjectStore, run_id: str) -> dict[int, list[tuple[str, int]]]:
    """(family, prompt's seed) of every group that each batch names."""
    return {
        version: [(group.family, group.seed_env) for group in read_batch(store, run_id, version).groups]
        for version in batch_versions(store, run_id)
    }


def lags_of_trained_tokens(store: ObjectStore, run_id: str) -> list[int]:
    """Learner's version minus the token's, for every sampled token of every batch."""
    lags: list[int] = []
    for version in batch_versions(store, run_id):
        members = [member for group in read_batch(store, run_id, version).groups for member in group.members]
        for row in read_trajectories(store, [member.ref for member in members]):
            lags += (version - row.token_versions[row.loss_mask]).tolist()
    return lags


def sampled_versions(rows: pa.Table) -> set[int]:
    """Policy versions of all sampled tokens of trajectory rows."""
    versions: set[int] = set()
    for row in rows.select(["token_versions", "loss_mask"]).to_pylist():
        versions |= set(np.array(row["token_versions"])[np.array(row["loss_mask"], bool)].tolist())
    return versions


def trajectory_rows(store: ObjectStore, run_id: str) -> pa.Table:
    return run_dataset(store, run_id).to_table()


# -- through Prefect's API -----------------------------------------------------------------------------------------


def flow_run_named(flow_name: str, name: str) -> FlowRun:
    """The only run of a flow that has this name."""
    (run,) = flow_runs_named(flow_name, name)
    return run


def flow_runs_named(flow_name: str, name: str) -> list[FlowRun]:
    """The runs of a flow that have this name, the oldest first."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[flow_name])),
            flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])),
        )
    return sorted(runs, key=lambda run: str(run.start_time))


def subflow_runs(parent: UUID, flow_name: str) -> list[FlowRun]:
    """The runs of a flow below a parent run, by name."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[flow_name])),
            flow_run_filter=FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent])),
        )
    return sorted(runs, key=lambda run: run.name)


def completed_tasks(flow_run: FlowRun, num_expected: int) -> list[str]:
    """Names of the tasks of a flow run, every one of them completed."""

    def names() -> list[str] | None:
        with get_client(sync_client=True) as client:
            runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id])))
        done = [run.name.rsplit("-", 1)[0] for run in runs if run.state is not None and run.state.is_completed()]
        return sorted(done) if len(done) == len(runs) and len(runs) >= num_expected else None

    return wait_for(f"{num_expected} completed task runs of {flow_run.name}", names, RECORDED_S)


def log_lines(flow_run: FlowRun) -> list[str]:
    """What was logged to a flow run and its tasks, in order (at most 200 lines)."""
    with get_client(sync_client=True) as client:
        logs = client.read_logs(log_filter=LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id])), limit=200)
    return [log.message for log in logs]


def stage_workers(flow_run: FlowRun, num_expected: int) -> dict[str, str]:
    """For each task of a flow run the worker that ran it, from the run's log."""

    def workers() -> dict[str, str] | None:
        found = dict(
            match.groups()
            for line in log_lines(flow_run)
            if (match := re.fullmatch(r"(\S+) runs on worker (\S+)", line)) is not None
        )
        return found if len(found) >= num_expected else None

    return wait_for(f"log lines of {num_expected} stages of {flow_run.name}", workers, RECORDED_S)


def assert_stages_ran_on_their_workers(train_run: FlowRun, num_iterations: int, *, streamed: bool = False) -> None:
    """S19, and hardware affinity of stages: at most 7 task runs an iteration, each on a worker of its class."""
    stages = STAGES | ({"stream": "learner-0"} if streamed else {})
    runs = subflow_runs(train_run.id, "rl-iteration")
    assert [run.name for run in runs] == [f"iteration-{version}" for version in range(num_iterations)]
    for run in runs:
        assert run.state is not None and run.state.is_completed(), run.state
        tasks = completed_tasks(run, len(stages))
        assert tasks == sorted(stages) and len(tasks) <= 7
        assert stage_workers(run, len(stages)) == stages
