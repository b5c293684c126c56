"""Which Prefect server does a run use, and who starts it?

A flow is a client of the server before its body runs, so the server must be there before the flow engine. A
`ServerFlow` that is called from Python finds or starts one first; in every other respect it is a normal flow.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import httpx
from prefect import Flow
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_logger
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    get_current_settings,
    temporary_settings,
)
from prefect.utilities.callables import get_call_parameters

from flows.pool_task import hand_in_reports
from flows.server_watch import server_watched
from resources.failures import InfrastructureFailure
from resources.pools.local_stack import local_stack
from resources.state_dir import state_dir as default_state_dir

P = ParamSpec("P")
R = TypeVar("R")

REACH_S = 5.0
"""Longest wait for a server that is configured to answer."""
REPLICAS_AT_ONCE = 4
"""Flow runs that the local worker of the reward pool may run at once."""


@dataclass(frozen=True, slots=True)
class PrefectServer:
    """The server of this run."""

    api_url: str
    is_local: bool
    """Held by a lease of this process: it ends with its last user."""


def check_reachable(api_url: str) -> None:
    """Raises:
    InfrastructureFailure: nothing answers at the address; names it and the remedy.
    """
    try:
        httpx.get(f"{api_url.rstrip('/')}/health", timeout=REACH_S)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise InfrastructureFailure(
            f"no Prefect server answers at {api_url} ({error}), which PREFECT_API_URL or the active Prefect profile "
            "names; start it, correct the address, or remove the setting (prefect config unset PREFECT_API_URL) to "
            "let the run start a server of its own"
        ) from error


@contextmanager
def prefect_server(
    *, state_dir: str | os.PathLike[str] | None = None, work_pools: Mapping[str, int] | None = None
) -> Iterator[PrefectServer]:
    """The configured server, or else a lease on the local stack; its address is set for the block.

    The address is set as a Prefect setting, for this process, and in ``os.environ``, for those that it starts. The
    heartbeat of flows is off inside: its thread costs every synchronous flow run about a second. So are Prefect Cloud's
    trace labels: a call a flow run, which on SQLite meets a lock now and then and is tried again two seconds later.

    Args:
        state_dir: state folder of the local stack; default `resources.state_dir.state_dir`.
        work_pools: process work pools that the local stack must serve, with their limits; default the reward pool
            (``REWARD_POOL``, or ``rewards``). A configured server has workers of its own.

    Raises:
        InfrastructureFailure: the configured server does not answer, or the local one cannot start.
        ValueError: the state folder cannot be written.
    """
    configured = get_current_settings().api.url
    if configured is not None:
        check_reachable(configured)
        with _address_set(configured):
            yield PrefectServer(configured, is_local=False)
        return
    folder = default_state_dir() if state_dir is None else state_dir
    pools = {os.environ.get("REWARD_POOL", "rewards"): REPLICAS_AT_ONCE} if work_pools is None else work_pools
    with local_stack(folder, work_pools=pools) as stack, _address_set(stack.api_url):
        get_logger("flows.server").info("Prefect server at %s (history in %s)", stack.ui_url, stack.state_dir)
        yield PrefectServer(stack.api_url, is_local=True)


@contextmanager
def told_when_lost(server: PrefectServer) -> Iterator[None]:
    """A server that goes away under a flow is named, with the remedy: Prefect's own error names neither.

    Raises InfrastructureFailure in the place of a connection error of the flow's client.
    """
    try:
        yield
    except httpx.TransportError as error:
        log = f"; its log is in {default_state_dir() / 'logs'}" if server.is_local else ""
        raise InfrastructureFailure(
            f"the Prefect server at {server.api_url} was lost under the run ({type(error).__name__}: {error}){log}. "
            "What was recorded is in the store: start the server again (a local one starts by itself), and resume the "
            "run with --resume"
        ) from error


@contextmanager
def _address_set(api_url: str) -> Iterator[None]:
    before = os.environ.get("PREFECT_API_URL")
    os.environ["PREFECT_API_URL"] = api_url
    try:
        with temporary_settings(
            {
                PREFECT_API_URL: api_url,
                PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
                PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY: False,
            }
        ) as settings:
            try:
                with server_watched(api_url, settings):
                    yield
            finally:
                hand_in_reports()  # a local server may end with this block
    finally:
        if before is None:
            os.environ.pop("PREFECT_API_URL", None)
        else:
            os.environ["PREFECT_API_URL"] = before


def server_ui_url() -> str:
    """Where the UI of the server in use is."""
    return str(PREFECT_API_URL.value()).removesuffix("/api")


class ServerFlow(Flow[P, R]):
    """A flow that finds or starts its Prefect server when it is called from Python.

    Runs of its deployments, and calls inside another run, have a server already and pass straight on. ``check`` is
    called with the flow's arguments before any of that, so that bad input is refused before anything starts.
    """

    check: Callable[..., None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = super().__call__
        self._check(args, kwargs)
        if FlowRunContext.get() is not None or TaskRunContext.get() is not None:
            return run(*args, **kwargs)
        if self.isasync:
            return self._call_async(cast(Callable[..., Coroutine[Any, Any, Any]], run), args, kwargs)
        with prefect_server() as server, told_when_lost(server):
            return run(*args, **kwargs)

    async def _call_async(
        self, run: Callable[..., Coroutine[Any, Any, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with prefect_server() as server, told_when_lost(server):
            return await run(*args, **kwargs)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.check is not None:
            self.check(**get_call_parameters(self.fn, args, kwargs))

    def with_options(self, **options: Any) -> ServerFlow[P, R]:
        """A copy with other options, which checks its input and finds its server too."""
        copy = super().with_options(**options)
        copy.__class__ = type(self)  # Prefect builds a plain Flow
        ours = cast(ServerFlow[P, R], copy)
        ours.check = self.check
        return ours


def server_flow(
    *, check: Callable[..., None] | None = None, **options: Any
) -> Callable[[Callable[P, R]], ServerFlow[P, R]]:
    """Decorator like ``prefect.flow``, for flows that people call from Python: ``@server_flow(name="train")``.

    Args:
        check: called with the flow's arguments, defaults included, before a server is sought; raises for bad input.
        options: of ``prefect.flow``.
    """
    return functools.partial(_build, check, options)


def _build(check: Callable[..., None] | None, options: dict[str, Any], function: Callable[P, R]) -> ServerFlow[P, R]:
    built: ServerFlow[P, R] = ServerFlow(function, **options)
    built.check = check
    return built
