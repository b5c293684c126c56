"""The Dask pools of a flow, checked, and the task runner that dispatches stages to them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Client, Future
from distributed import TimeoutError as DaskTimeoutError
from prefect.settings import PREFECT_API_URL
from prefect.task_runners import TaskRunner

from flows.task_runner import Connection, PoolTaskRunner
from resources.failures import DeadlineExceeded
from resources.hardware import PoolsConfig, Role
from resources.pools.cluster import open_pools
from resources.pools.import_ahead import import_all
from resources.pools.preflight import ServingClasses, check_pools

PRELOAD = ("prefect", "flows.task_runner", "flows.pool_task", "flows.iteration", "flows.warm_start")
"""What workers import before they take work: Prefect and the stages alone cost the first task some seconds."""
ROLE_IMPORTS: dict[Role, tuple[str, ...]] = {
    "engine": ("resources.engines.local", "transformers:AutoConfig"),
    "learner": (
        "tasks.training.learner",
        "tasks.warm_start.train",
        "transformers:PreTrainedTokenizerFast",
        "transformers:GenerationConfig",
        "transformers:Qwen3ForCausalLM",
    ),
    "environment": ("resources.rollout.worker", "transformers:PreTrainedTokenizerFast"),
    "control": ("resources.rollout.group_queue",),
}
"""What the actors and stages of a role import, now or later."""
SIMULATED_IMPORTS: dict[Role, tuple[str, ...]] = {**ROLE_IMPORTS, "engine": ("resources.engines.simulated",)}
"""The same where engines are simulated: thousands of them have no use for torch."""
IMPORT_S = 120.0
"""Longest wait for the imports of all workers, in seconds."""
CONSOLE_LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"


@dataclass(frozen=True)
class RunPools:
    """A connected, checked cluster."""

    client: Client
    serving: Mapping[str, str]
    """For each hardware class the class whose workers serve it."""
    imports: Mapping[Role, list[Future[None]]] = field(default_factory=dict)
    """What workers import ahead, by role."""
    role_imports: Mapping[Role, tuple[str, ...]] = field(default_factory=lambda: ROLE_IMPORTS)
    """What that is."""
    connection: Connection | None = None
    """What the task runners of all flows share; None: each connects anew."""

    @property
    def address(self) -> str:
        scheduler = self.client.scheduler
        assert scheduler is not None, "the client was closed"
        return str(scheduler.address)

    def wait_for_imports(self, *roles: Role) -> None:
        """Until the workers of these roles (default: all) have imported what they need.

        To be called before anything else imports there: see `import_all`.

        Raises:
            DeadlineExceeded: not within `IMPORT_S` seconds. What an import itself raises arrives as it is.
        """
        deadline = time.monotonic() + IMPORT_S
        wanted: Iterable[Role] = roles or self.imports
        for role in wanted:
            for future in self.imports.get(role, []):
                try:
                    future.result(timeout=max(0.0, deadline - time.monotonic()))
                except DaskTimeoutError as error:
                    raise DeadlineExceeded(
                        f"a worker with role {role} did not import {self.role_imports[role]} within {IMPORT_S:g} s"
                    ) from error

    @contextmanager
    def stages_cancelled_on_error(self) -> Iterator[None]:
        """Let whoever waits for a stage, in other threads, end at once when the block is left by an error: flow runs
        say what became of them while actors and cluster are closed."""
        try:
            yield
        except BaseException:
            if self.connection is not None:
                with suppress(OSError, DaskTimeoutError):  # the scheduler may be what was lost
                    self.client.cancel(list(self.connection.last_of_task.values()))
            raise

    def task_runner(self) -> TaskRunner[Any]:
        """A new runner for one flow: stages go to the class that their ``pool:<class>`` tag names."""
        return PoolTaskRunner(self.address, dict(self.serving), self.connection)


@contextmanager
def run_pools(config: PoolsConfig, state: Path, backend: str = "local") -> Iterator[RunPools]:
    """Open (or attach to) the pools of a run; raises within a bounded time when a class has no workers.

    Args:
        backend: of its engines.
    """
    wanted = role_imports(backend)
    logs = state / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    env = {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "HF_HUB_OFFLINE": "1"}
    if CONSOLE_LEVEL in os.environ:
        env[CONSOLE_LEVEL] = os.environ[CONSOLE_LEVEL]
    # Workers are forked from a process that has imported these: what only the learner needs is not among them when no
    # engine needs it.
    shared = dict.fromkeys(
        name.partition(":")[0]
        for role, names in wanted.items()
        for name in names
        if role != "learner" or backend != "simulated"
    )
    log_path = logs / f"dask-{os.getpid()}.log"
    with open_pools(config, env=env, preload_modules=PRELOAD, shared_modules=shared, log_path=log_path) as client:
        checked = check_pools(client, config)
        ahead = _import_ahead(client, config, checked, wanted)
        yield RunPools(client, checked.serving, ahead, wanted, Connection(client))


def role_imports(backend: str) -> Mapping[Role, tuple[str, ...]]:
    """What each role imports in a run with engines of this back end."""
    return SIMULATED_IMPORTS if backend == "simulated" else ROLE_IMPORTS


def _import_ahead(
    client: Client, config: PoolsConfig, checked: ServingClasses, wanted: Mapping[Role, tuple[str, ...]]
) -> dict[Role, list[Future[None]]]:
    """Let workers import what their roles need (torch takes seconds) while the driver still does other things."""
    modules: dict[str, list[str]] = {}
    workers: dict[Role, list[str]] = {}
    for name, hardware_class in config.classes.items():
        for worker in checked.workers_of(name):
            modules.setdefault(worker, []).extend(wanted[hardware_class.role])
            workers.setdefault(hardware_class.role, []).append(worker)
    # One call a worker, for one thread: see `RunPools.wait_for_imports`.
    ahead = {
        worker: client.submit(import_all, names, workers=[worker], allow_other_workers=False, pure=False)
        for worker, names in modules.items()
    }
    return {role: [ahead[worker] for worker in of_role] for role, of_role in workers.items()}
