from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import StateType, WorkerStatus, WorkPoolStatus
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from resources.rewards.config import RewardsConfig
from tasks.reward.launch import PrefectLauncher

URL = "http://127.0.0.1:4999/api"
CONFIG = RewardsConfig(max_replicas=3)


class PaperServer:
    """What a Prefect server would say, and what it was asked."""

    def __init__(self) -> None:
        self.deployments = {CONFIG.deployment: SimpleNamespace(work_pool_name="rewards")}
        self.pools = {"rewards": SimpleNamespace(type="process", is_paused=False, status=WorkPoolStatus.READY)}
        self.workers = [WorkerStatus.OFFLINE, WorkerStatus.ONLINE]
        self.flow_runs: list[SimpleNamespace] = []
        self.cancelled: list[Any] = []
        self.num_looks = 0
        self.at_third_look: Callable[[], None] = lambda: None
        self.launched: list[dict[str, Any]] = []
        self.is_up = True
        self.seen_url: list[str | None] = []

    def __enter__(self) -> PaperServer:
        self._answer()
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    def _answer(self) -> None:
        self.seen_url.append(PREFECT_API_URL.value())
        assert FlowRunContext.get() is None
        if not self.is_up:
            raise httpx.ConnectError("connection refused")

    @staticmethod
    def _find(things: dict[str, Any], name: str) -> Any:
        if name not in things:
            raise ObjectNotFound(http_exc=RuntimeError("404"))
        return things[name]

    def read_deployment_by_name(self, name: str) -> Any:
        return self._find(self.deployments, name)

    def read_work_pool(self, name: str) -> Any:
        return self._find(self.pools, name)

    def read_workers_for_work_pool(self, name: str) -> list[Any]:
        return [SimpleNamespace(status=status) for status in self.workers]

    def add_run(self, state: StateType, tags: list[str] | None = None) -> SimpleNamespace:
        self.flow_runs.append(SimpleNamespace(id=uuid4(), state=state, tags=tags or ["run:run-1"]))
        return self.flow_runs[-1]

    def read_flow_runs(self, *, flow_run_filter: Any) -> list[Any]:
        self.num_looks += 1
        if self.num_looks == 3:
            self.at_third_look()
        tags, states = flow_run_filter.tags.all_, flow_run_filter.state.type.any_
        return [run for run in self.flow_runs if run.state in states and set(tags) <= set(run.tags)]

    def set_flow_run_state(self, flow_run_id: Any, state: Any) -> None:
        assert state.type is StateType.CANCELLING
        self.cancelled.append(flow_run_id)
        for run in self.flow_runs:
            if run.id == flow_run_id:
                run.state = StateType.CANCELLED

    def run_deployment(self, name: str, **arguments: Any) -> Any:
        self._answer()
        self._find(self.deployments, name)
        self.launched.append({"name": name} | arguments)
        return SimpleNamespace(name="brave-heron")


@pytest.fixture
def server() -> PaperServer:
    return PaperServer()


@pytest.fixture
def launcher(server):
    with temporary_settings({PREFECT_API_URL: URL}):
        yield PrefectLauncher("s3://bucket/store", "run-1", CONFIG, client=lambda: server, run=server.run_deployment)


def test_a_launch_names_the_store_the_run_and_the_configuration(launcher, server):
    launcher.launch(2)
    assert server.launched == 2 * [
        {
            "name": "serve-rewards/serverless",
            "parameters": {"store": "s3://bucket/store", "run_id": "run-1", "config": CONFIG.model_dump(mode="json")},
            "tags": ["run:run-1"],
            "timeout": 0,
            "as_subflow": False,
        }
    ]
    assert RewardsConfig(**server.launched[0]["parameters"]["config"]) == CONFIG


def test_a_launch_from_a_plain_thread_uses_the_settings_of_the_run(launcher, server):
    errors: list[BaseException] = []

    def launch() -> None:
        try:
            launcher.launch(1)
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=launch)  # a thread of its own has none of the context's settings
    thread.start()
    thread.join(timeout=20)
    assert errors == []
    assert server.seen_url == [URL]


def test_all_is_well(launcher):
    launcher.check()


def test_a_pool_without_workers_of_its_own_needs_none(launcher, server):
    server.workers = []
    server.pools["rewards"].type = "cloud-run-v2:push"
    launcher.check()


def deploy_elsewhere(server: PaperServer) -> None:
    server.deployments[CONFIG.deployment] = SimpleNamespace(work_pool_name="other")


def pause_the_pool(server: PaperServer) -> None:
    server.pools["rewards"].is_paused = True


def stop_the_server(server: PaperServer) -> None:
    server.is_up = False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.deployments.clear(),
            "deployment 'serve-rewards/serverless' does not exist .*make up.*deploy --all",
        ),
        (deploy_elsewhere, "runs on work pool 'other' .*rewards.work_pool is 'rewards'"),
        (lambda s: s.pools.clear(), "rewards.work_pool 'rewards' does not exist .*make up"),
        (pause_the_pool, "rewards.work_pool 'rewards' is paused .*resume rewards"),
        (lambda s: s.workers.pop(), r"no worker of rewards.work_pool 'rewards' is online .*\(1 offline\).*make up"),
        (stop_the_server, "cannot be reached .*connection refused.*make up"),
    ],
)
def test_what_is_missing_is_said_with_the_server_and_the_remedy(launcher, server, change, message):
    change(server)
    with pytest.raises(ValueError, match=f"(?s){message}") as raised:
        launcher.check()
    assert f"PREFECT_API_URL={URL}" in str(raised.value)


def test_a_launch_that_fails_says_why(launcher, server):
    server.deployments.clear()
    with pytest.raises(ValueError, match="'serve-rewards/serverless' does not exist"):
        launcher.launch(1)
    server.is_up = False
    with pytest.raises(ValueError, match="cannot be reached"):
        launcher.launch(1)


def test_without_an_address_no_server_is_started(server):
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        launcher = PrefectLauncher("/store", "run-1", CONFIG, client=lambda: server, run=server.run_deployment)
        with pytest.raises(ValueError, match="no Prefect server is known: run `make up`, or set PREFECT_API_URL"):
            launcher.check()


def test_only_replicas_that_no_worker_has_taken_are_cancelled(launcher, server):
    waiting, running = server.add_run(StateType.SCHEDULED), server.add_run(StateType.RUNNING)
    server.add_run(StateType.SCHEDULED, tags=["run:another"])
    assert launcher.cancel_all() == 1
    assert server.cancelled == [waiting.id]
    assert running.state is StateType.RUNNING


def test_replicas_that_run_are_waited_for_at_the_end(launcher, server):
    waiting, running, done = map(server.add_run, [StateType.SCHEDULED, StateType.RUNNING, StateType.COMPLETED])
    server.at_third_look = lambda: setattr(running, "state", StateType.COMPLETED)
    assert launcher.end_all(timeout_s=60, poll_s=0.001) == 0
    assert server.cancelled == [waiting.id]
    assert done.state is StateType.COMPLETED


def test_replicas_that_do_not_end_are_cancelled_at_the_deadline(launcher, server, caplog):
    running = server.add_run(StateType.RUNNING)
    assert launcher.end_all(timeout_s=0.01, poll_s=0.001) == 1
    assert server.cancelled == [running.id]
    assert "1 reward replicas had not ended 0.01 s after the run" in caplog.text


def test_in_an_event_loop_the_launch_is_still_synchronous(launcher, server):
    async def launch() -> None:
        await asyncio.to_thread(launcher.launch, 1)

    asyncio.run(launch())
    assert len(server.launched) == 1
