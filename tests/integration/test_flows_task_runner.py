"""Prefect tasks on Dask pools: where they land, which states they reach, what happens when a worker dies."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import cloudpickle
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, LogFilter, LogFilterFlowRunId
from prefect.context import FlowRunContext
from prefect.futures import wait

from flows.server import PrefectServer, prefect_server
from flows.task_runner import Connection, PoolTaskRunner, hardware_class_of
from resources.failures import InfrastructureFailure
from resources.hardware import HardwareClass, PoolsConfig
from resources.pools.cluster import attach, embedded_cluster
from tests.integration import pool_tasks

CONFIG = PoolsConfig(
    classes={
        "compute": HardwareClass(role="engine"),
        "bandwidth": HardwareClass(role="engine", num_workers=0, fallback=("compute",)),
        "learner": HardwareClass(role="learner"),
        "cpu": HardwareClass(role="environment", num_workers=0),
        "control": HardwareClass(role="control", num_workers=0),
    },
    no_workers_timeout_s=1,
)
PRELOAD = ["flows.pool_task", "tests.integration.pool_tasks"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with prefect_server(state_dir=tmp_path_factory.mktemp("state"), work_pools={}) as server:
        yield server


@pytest.fixture(scope="module")
def address(server: PrefectServer) -> Iterator[str]:
    with embedded_cluster(CONFIG, env={"PREFECT_API_URL": server.api_url}, preload_modules=PRELOAD) as client:
        yield str(client.scheduler.address)


@pytest.fixture(scope="module")
def standing_address(server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster that somebody else started: nothing of this process reaches it but its address."""
    scheduler_file = tmp_path_factory.mktemp("standing") / "scheduler.json"
    command = [sys.executable, "-m", "resources.pools.standing", "--classes", "compute=1,bandwidth=0,cpu=0,control=0"]
    command += ["--scheduler-file", str(scheduler_file), "--env", f"PREFECT_API_URL={server.api_url}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while not scheduler_file.exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            yield json.loads(scheduler_file.read_text())["address"]
        finally:
            process.terminate()


def run_on(address: str, body: Callable[[], Any], serving: dict[str, str] | None = None) -> tuple[UUID, Any]:
    """Run ``body`` as the body of a flow on the pools at ``address``; its run's id and what it returns."""

    def on_pools() -> tuple[UUID, Any]:
        context = FlowRunContext.get()
        assert context is not None and context.flow_run is not None
        return context.flow_run.id, body()

    return flow(on_pools, name="on-pools", task_runner=PoolTaskRunner(address, serving), persist_result=False)()


def states_of(flow_run_id: UUID, count: int) -> dict[str, str]:
    """States by name of task once ``count`` final ones are recorded: they arrive as events, some time later."""
    deadline = time.monotonic() + 15
    with get_client(sync_client=True) as client:
        while True:
            runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
            final = {
                run.name.rsplit("-", 1)[0]: str(run.state_name) for run in runs if run.state and run.state.is_final()
            }
            if len(final) >= count or time.monotonic() > deadline:
                return final
            time.sleep(0.1)


def books(dask_scheduler: Any) -> tuple[int, int]:
    """What the scheduler remembers of tasks that are over: spans and groups."""
    return len(dask_scheduler.extensions["spans"].spans), len(dask_scheduler.task_groups)


def test_flow_runs_on_a_shared_connection_leave_the_scheduler_as_it_was(address: str) -> None:
    """What is remembered of every iteration would fill the scheduler of a long run."""
    with attach(address) as client:
        connection = Connection(client)
        runner = PoolTaskRunner(address, connection=connection)
        seen = []
        for _ in range(4):
            flow(
                lambda: [pool_tasks.where_compute.submit().result(), pool_tasks.double.submit(3).result()],
                name="on-shared",
                task_runner=runner,
                persist_result=False,
            )()
            seen.append(client.run_on_scheduler(books))
        assert seen[1:] == seen[:1] * 3
        assert client.status == "running"
        travelled = cloudpickle.loads(cloudpickle.dumps(runner))
        assert travelled == runner and travelled._shared is None


@pytest.mark.parametrize("cluster", ["address", "standing_address"])
def test_tasks_land_on_the_workers_of_their_class(cluster: str, request: pytest.FixtureRequest) -> None:
    def body() -> list[str]:
        futures = [pool_tasks.where_compute.submit() for _ in range(3)]
        futures += [pool_tasks.where_learner.submit() for _ in range(3)]
        futures += [pool_tasks.where_bandwidth.submit()]
        return [future.result(timeout=30) for future in futures]

    _, names = run_on(request.getfixturevalue(cluster), body, serving={"bandwidth": "compute"})
    assert names == ["compute-0"] * 3 + ["learner-0"] * 3 + ["compute-0"]


def test_states_are_those_of_any_other_task_runner(address: str, tmp_path: Path) -> None:
    (tmp_path / "retries").mkdir()

    def body() -> dict[str, Any]:
        doubled = pool_tasks.double.submit(3)
        failed = pool_tasks.fail.submit()
        retried = pool_tasks.fail_twice.submit(str(tmp_path / "retries"))
        blocked = pool_tasks.double.with_options(name="blocked").submit(failed)
        later = pool_tasks.mark_after.submit(str(tmp_path), 0.3)
        ordered = pool_tasks.is_marked.submit(str(tmp_path), wait_for=[later])
        chained = pool_tasks.double_later.submit(doubled)
        mapped = pool_tasks.double.with_options(name="mapped").map([1, 2, 3])
        done, not_done = wait([doubled, chained], timeout=30)
        with pytest.raises(ValueError, match="no such value"):
            failed.result(timeout=30)
        blocked.wait(timeout=30)
        return {
            "waited for": (len(done), len(not_done)),
            "doubled": doubled.result(timeout=30),
            "chained": chained.result(timeout=30),
            "retried": retried.result(timeout=30),
            "mapped": [future.result(timeout=30) for future in mapped],
            "ordered": ordered.result(timeout=30),
            "states": (failed.state.name, blocked.state.name, blocked.state.type.value, doubled.state.name),
        }

    flow_run_id, seen = run_on(address, body)
    assert seen == {
        "waited for": (2, 0),
        "doubled": 6,
        "chained": 12,
        "retried": 2,
        "mapped": [2, 4, 6],
        "ordered": True,
        "states": ("Failed", "NotReady", "PENDING", "Completed"),
    }
    recorded = states_of(flow_run_id, 7)
    assert recorded["fail"] == "Failed"
    assert recorded["fail_twice"] == "Completed"
    assert {recorded[name] for name in ("double", "double_later", "mapped", "is_marked", "mark_after")} == {"Completed"}


def test_a_task_names_exactly_one_class(address: str) -> None:
    assert hardware_class_of(pool_tasks.double) == "compute"
    with pytest.raises(ValueError, match=r"task 'untagged' has the pool tags \[\]; it needs exactly one"):
        run_on(address, pool_tasks.untagged.submit)
    with pytest.raises(ValueError, match=r"task 'tagged_twice' has the pool tags \['pool:compute', 'pool:learner'\]"):
        run_on(address, pool_tasks.tagged_twice.submit)


def test_a_killed_worker_crashes_its_task_run(address: str) -> None:
    """S20: an error within a bounded time, visible in the run's state."""

    def body() -> tuple[str, str]:
        future = pool_tasks.die.submit()
        started = time.monotonic()
        with pytest.raises(
            InfrastructureFailure, match=r"task die could not run on hardware class learner: its worker"
        ):
            future.result(timeout=60)
        assert time.monotonic() - started < 45  # the bound is the point, not the speed: this machine may be busy
        return future.state.name, str(future.state.message)

    flow_run_id, (name, message) = run_on(address, body)
    assert name == "Crashed"
    assert "learner-0" in message
    assert states_of(flow_run_id, 1) == {"die": "Crashed"}


def test_a_class_without_workers_crashes_the_task_run(address: str) -> None:
    """S20, with nobody left: the run is recorded although no worker ever saw it."""

    def body() -> str:
        future = pool_tasks.where_nobody.submit()
        future.wait(timeout=20)
        return future.state.name

    flow_run_id, name = run_on(address, body)
    assert name == "Crashed"
    with get_client(sync_client=True) as client:
        (run,) = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
    assert run.state is not None and run.state.name == "Crashed"
    assert "where_nobody could not run on hardware class nobody: NoValidWorkerError" in str(run.state.message)


def test_standard_logging_of_a_stage_reaches_the_flow_run(address: str) -> None:
    flow_run_id, _ = run_on(address, lambda: pool_tasks.log_line.submit("a line from a worker").result(timeout=30))
    deadline = time.monotonic() + 15
    with get_client(sync_client=True) as client:
        lines: list[str] = []
        while "a line from a worker" not in lines and time.monotonic() < deadline:
            logs = client.read_logs(log_filter=LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id])))
            lines = [log.message for log in logs]
            time.sleep(0.2)
    assert "a line from a worker" in lines


def test_a_timeout_leaves_the_task_running(address: str, tmp_path: Path) -> None:
    def body() -> bool:
        future = pool_tasks.mark_after.with_options(tags={"pool:compute"}).submit(str(tmp_path), 0.5)
        with pytest.raises(TimeoutError, match="task run mark_after"):
            future.result(timeout=0.05)
        future.wait(timeout=30)
        return future.state.is_completed()

    assert run_on(address, body)[1] is True
