"""The main job on a standing stack, as deployments: ``make up``, ``prefect deployment run``, ``down``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_URL, temporary_settings

from resources.object_store import ObjectStore
from resources.pools.local_stack import read_status
from resources.pools.prefect_processes import free_port
from resources.runs import find_run, iterations
from tests.integration.stack_processes import ROOT, assert_gone, driver_environment, stack_pids
from tests.integration.stack_runs import (
    assert_stages_ran_on_their_workers,
    completed_tasks,
    lags_of_trained_tokens,
    small_fields,
    stage_workers,
    subflow_runs,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

RUN_S = 600
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Standing:
    """A stack that ``make up`` started, in a state folder of its own."""

    state: Path
    env: dict[str, str]
    """Of whoever uses it: its address is set."""
    dask_address: str
    store: Path

    def prefect(self, *arguments: str) -> subprocess.Popen[str]:
        """``prefect ...``, somewhere else than in the checkout."""
        return subprocess.Popen(
            [str(BIN / "prefect"), *arguments],
            cwd=self.state,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    state = tmp_path_factory.mktemp("standing")
    env = driver_environment(state)
    # The virtual environment is the one that runs the tests: nothing is installed here.
    make = ["make", "--no-print-directory", f"BIN={BIN}", "-o", ".venv/.installed"]
    up = subprocess.run(
        [*make, "up", f"ARGS=--port {free_port()}"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400
    )
    pids = stack_pids(state) if up.returncode == 0 else []
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        status = read_status(state)
        assert status is not None and status["standing"]
        assert status["api_url"] in up.stdout and status["dask_address"] in up.stdout
        assert sorted(status["children"]) == ["dask", "prefect-server", "worker-rewards", "worker-training"]
        with temporary_settings({PREFECT_API_URL: status["api_url"]}):
            yield Standing(
                state, {**env, "PREFECT_API_URL": status["api_url"]}, status["dask_address"], state / "store"
            )
        pids = stack_pids(state)
    finally:
        down = subprocess.run([*make, "down"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
        assert (down.returncode, down.stdout) == (0, "nothing of the stack is left\n"), down.stderr
        assert_gone(pids)


@pytest.fixture(scope="module")
def trained(standing: Standing) -> dict[str, FlowRun]:
    """Two runs at once on one standing cluster, one by ``--param overrides``, one by ``--param config``."""
    overrides = _dotted(small_fields(standing.store / "overrides", "by-overrides"))
    overrides["pools.address"] = standing.dask_address
    synchronous = {"pipeline": "synchronous", "max_staleness": 0}
    config = small_fields(standing.store / "config", "by-config", rollout=synchronous, num_iterations=2)
    config["pools"] = {**config["pools"], "address": standing.dask_address}
    commands = [
        standing.prefect("deployment", "run", "train/quickstart", "--watch", "--param", parameter)
        for parameter in (f"overrides={json.dumps(overrides)}", f"config={json.dumps(config)}")
    ]
    runs = {}
    try:
        for name, command in zip(("by-overrides", "by-config"), commands, strict=True):
            said, _ = command.communicate(timeout=RUN_S)
            log = (standing.state / "logs" / "worker-training.log").read_text(errors="replace")
            assert command.returncode == 0, said + log[-20_000:]
            runs[name] = _read(re.findall(r"UUID: (\S+)", said)[0])
    finally:
        for command in commands:
            if command.poll() is None:
                command.kill()
                command.communicate()
    return runs


def _dotted(fields: dict[str, Any]) -> dict[str, Any]:
    """A run file as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict):
            found |= {f"{key}.{below}": inner for below, inner in _dotted(value).items()}
        else:
            found[key] = value
    return found


def test_the_deployments_are_registered(standing: Standing) -> None:
    with get_client(sync_client=True) as client:
        pools = {
            name: client.read_deployment_by_name(name).work_pool_name
            for name in ("train/quickstart", "serve-rewards/serverless", "evaluate/latest", "warm-start/quickstart")
        }
        (schedule,) = client.read_deployment_by_name("train/quickstart").schedules
    assert pools == {
        "train/quickstart": "training",
        "serve-rewards/serverless": "rewards",
        "evaluate/latest": "training",
        "warm-start/quickstart": "training",
    }
    assert schedule.active is False


@pytest.mark.parametrize(("name", "num_iterations", "lags"), [("by-overrides", 3, {0, 1}), ("by-config", 2, {0})])
def test_deployed_runs_train_on_the_standing_cluster(
    standing: Standing, trained: dict[str, FlowRun], name: str, num_iterations: int, lags: set[int]
) -> None:
    flow_run = trained[name]
    assert flow_run.deployment_id is not None
    assert flow_run.state is not None and flow_run.state.is_completed()
    store = standing.store / name.removeprefix("by-")
    run = find_run(str(store), "latest")
    assert iterations(run) == list(range(num_iterations))
    assert run.folder().get_json("summary.json")["num_iterations"] == num_iterations
    assert set(lags_of_trained_tokens(ObjectStore.open(str(store)), run.run_id)) == lags
    assert run.folder().list("rewards/results/"), "nothing was scored on the reward pool"


@pytest.mark.parametrize(("name", "num_iterations"), [("by-overrides", 3), ("by-config", 2)])
def test_stages_land_on_standing_workers_of_their_class(
    trained: dict[str, FlowRun], name: str, num_iterations: int
) -> None:
    assert_stages_ran_on_their_workers(trained[name], num_iterations)
    (warm_start,) = subflow_runs(trained[name].id, "make-warm-start")
    assert stage_workers(warm_start, 1) == {"warm-start": "learner-0"}


def test_the_newest_run_is_evaluated_and_the_warm_start_is_cached(
    standing: Standing, trained: dict[str, FlowRun]
) -> None:
    store = str(standing.store / "overrides")
    config = small_fields(store, "again")
    config["pools"] = {**config["pools"], "address": standing.dask_address}
    evaluation = _start(
        "evaluate/latest", {"store": store, "num_episodes": 4, "pools_address": standing.dask_address, "greedy": True}
    )
    warm_start = _start("warm-start/quickstart", {"config": config})
    for run in (evaluation, warm_start):
        assert _ended(run).is_completed(), run.name
    run = find_run(store, "latest")
    measured = run.folder().get_json("evaluations/000003.json")
    assert (measured["version"], measured["greedy"]) == (3, True)
    assert set(measured["num_episodes"].values()) == {4}
    (stage,) = subflow_runs(evaluation.id, "evaluate-version")
    assert completed_tasks(stage, 1) == ["evaluate"]
    assert stage_workers(stage, 1) == {"evaluate": "control-0"}
    assert len({key.split("/")[1] for key in ObjectStore.open(store).list("warm_starts/")}) == 1


def _start(deployment: str, parameters: dict[str, Any]) -> FlowRun:
    return run_deployment(deployment, parameters=parameters, timeout=0, as_subflow=False)  # type: ignore[return-value]


def _read(flow_run_id: Any) -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run_id)


def _ended(run: FlowRun) -> Any:
    def state() -> Any:
        found = _read(run.id).state
        return found if found is not None and found.is_final() else None

    return wait_for(f"flow run {run.name} ends", state, RUN_S, poll_s=0.5)
