"""Launching reward replicas as runs of a Prefect deployment, and making sure beforehand that they can be launched."""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkerStatus, WorkPoolStatus
from prefect.context import get_settings_context
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from resources.rewards.config import RewardsConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
UNFINISHED = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED]
POOL_TYPES_WITHOUT_WORKER = (":push", ":managed")
"""Ends of the type names of pools (Prefect Cloud's) that start runs without a worker of one's own."""


class PrefectLauncher:
    """Launches replicas of one run with `run_deployment`, and ends what is left of them.

    May be called from any plain thread: calls run with the settings that hold where the launcher is made, and outside
    whatever flow run is in progress (replicas are no subflows, they may outlive an iteration). Not for coroutines:
    every call blocks.
    """

    def __init__(
        self,
        store_url: str,
        run_id: str,
        config: RewardsConfig,
        *,
        client: Callable[[], AbstractContextManager[SyncPrefectClient]] = lambda: get_client(sync_client=True),
        run: Callable[..., Any] = run_deployment,
    ) -> None:
        """``client`` and ``run`` are Prefect's own unless a test gives others."""
        self._config = config
        self._tags = [f"run:{run_id}"]
        self._parameters = {"store": store_url, "run_id": run_id, "config": config.model_dump(mode="json")}
        self._client = client
        self._run = run
        self._settings = get_settings_context()

    def launch(self, num_replicas: int) -> None:
        """Ask for more replicas; returns as soon as the server has their flow runs.

        Raises ValueError as `check` does when the deployment is missing or the server cannot be reached.
        """
        self._outside_the_flow(self._launch, num_replicas)

    def check(self) -> None:
        """Raises ValueError when a replica could not run, naming the server and the remedy: the server, the deployment,
        its work pool, or an online worker for it is missing, or the pool is paused."""
        self._outside_the_flow(self._check)

    def cancel_all(self) -> int:
        """Cancel this run's replicas that no worker has taken yet; returns how many.

        Those that have begun are left alone: they end by themselves when the run's heartbeat says that it has ended.
        (Cancelled from here they would be killed, or, when they end first, stay in state Cancelling for good.)
        """
        return self._outside_the_flow(self._cancel_scheduled)

    def end_all(self, timeout_s: float = 15.0, poll_s: float = 0.5) -> int:
        """After the run's heartbeat has ended: `cancel_all`, then wait until the other replicas have ended too.

        Those that are still there after ``timeout_s`` seconds are cancelled (their worker kills them); returns their
        number.
        """
        return self._outside_the_flow(self._end_all, timeout_s, poll_s)

    def _launch(self, num_replicas: int) -> None:
        for _ in range(num_replicas):
            try:
                flow_run = self._run(
                    self._config.deployment,
                    parameters=self._parameters,
                    tags=self._tags,
                    timeout=0,
                    as_subflow=False,
                )
            except ObjectNotFound as error:
                raise self._no_deployment() from error
            except httpx.TransportError as error:
                raise self._no_server(error) from error
            logger.info("asked for reward replica %s", flow_run.name)

    def _check(self) -> None:
        config, pool_name = self._config, self._config.work_pool
        with self._reachable_client() as client:
            try:
                deployment = client.read_deployment_by_name(config.deployment)
            except ObjectNotFound as error:
                raise self._no_deployment() from error
            if deployment.work_pool_name != pool_name:
                raise ValueError(
                    f"rewards.deployment {config.deployment!r} runs on work pool {deployment.work_pool_name!r} of the "
                    f"Prefect server at {_api_url()}, but rewards.work_pool is {pool_name!r}: set rewards.work_pool, "
                    f"or run `REWARD_POOL={pool_name} prefect deploy --all`"
                )
            try:
                pool = client.read_work_pool(pool_name)
            except ObjectNotFound as error:
                raise ValueError(
                    f"rewards.work_pool {pool_name!r} does not exist on the Prefect server at {_api_url()}: run "
                    f"`make up`, or `prefect work-pool create {pool_name} --type process`"
                ) from error
            if pool.is_paused or pool.status is WorkPoolStatus.PAUSED:
                raise ValueError(
                    f"rewards.work_pool {pool_name!r} is paused on the Prefect server at {_api_url()}: "
                    f"run `prefect work-pool resume {pool_name}`"
                )
            if pool.type.endswith(POOL_TYPES_WITHOUT_WORKER):
                return
            workers = client.read_workers_for_work_pool(pool_name)
        if not any(worker.status is WorkerStatus.ONLINE for worker in workers):
            raise ValueError(
                f"no worker of rewards.work_pool {pool_name!r} is online at the Prefect server at {_api_url()} "
                f"({len(workers)} offline): run `make up`, or `prefect worker start --pool {pool_name}`"
            )

    def _cancel_scheduled(self) -> int:
        return self._cancel([StateType.SCHEDULED])

    def _end_all(self, timeout_s: float, poll_s: float) -> int:
        end = time.monotonic() + timeout_s
        self._cancel_scheduled()
        while self._runs_in(UNFINISHED):
            if time.monotonic() >= end:
                num_left = self._cancel(UNFINISHED)
                logger.warning("%d reward replicas had not ended %g s after the run; cancelled", num_left, timeout_s)
                return num_left
            time.sleep(poll_s)
        return 0

    def _cancel(self, states: list[StateType]) -> int:
        flow_runs = self._runs_in(states)
        with self._reachable_client() as client:
            for flow_run in flow_runs:
                client.set_flow_run_state(flow_run.id, State(type=StateType.CANCELLING))
        return len(flow_runs)

    def _runs_in(self, states: list[StateType]) -> list[FlowRun]:
        ours = FlowRunFilter(
            tags=FlowRunFilterTags(all_=self._tags),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=states)),
        )
        with self._reachable_client() as client:
            return client.read_flow_runs(flow_run_filter=ours)

    @contextmanager
    def _reachable_client(self) -> Iterator[SyncPrefectClient]:
        try:
            with self._client() as client:
                yield client
        except httpx.TransportError as error:
            raise self._no_server(error) from error

    def _outside_the_flow(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call with our settings and nothing else of any context: no flow run to be a child of, no client of a flow
        that may have ended."""

        def call() -> T:
            with self._settings.model_copy():
                if not PREFECT_API_URL.value():  # Prefect would start a server of its own, which no worker knows
                    raise ValueError("no Prefect server is known: run `make up`, or set PREFECT_API_URL")
                return function(*arguments)

        return contextvars.Context().run(call)

    def _no_deployment(self) -> ValueError:
        return ValueError(
            f"rewards.deployment {self._config.deployment!r} does not exist on the Prefect server at {_api_url()}: run "
            f"`make up`, or `REWARD_POOL={self._config.work_pool} prefect deploy --all`"
        )

    def _no_server(self, error: httpx.TransportError) -> ValueError:
        return ValueError(
            f"the Prefect server at {_api_url()} cannot be reached ({type(error).__name__}: {error}): "
            "run `make up`, or set PREFECT_API_URL"
        )


def _api_url() -> str:
    return f"PREFECT_API_URL={PREFECT_API_URL.value()}"
