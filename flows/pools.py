"""The Dask pools of a flow, checked, and the task runner that dispatches stages to them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client, Future
from prefect.settings import PREFECT_API_URL
from prefect.task_runners import TaskRunner

from flows.task_runner import PoolTaskRunner
from resources.hardware import PoolsConfig, Role
from resources.pools.cluster import open_pools
from resources.pools.preflight import ServingClasses, check_pools

PRELOAD = ("prefect", "flows.task_runner", "flows.iteration", "flows.warm_start")
"""What workers import before they take work: Prefect and the stages alone cost the first task some seconds."""
ROLE_MODULES: dict[Role, str] = {
    "engine": "resources.engines.local",
    "learner": "tasks.training.learner",
    "environment": "resources.rollout.worker",
    "control": "resources.rollout.group_queue",
}
"""What the actors of a role import."""
CONSOLE_LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"


@dataclass(frozen=True)
class RunPools:
    """A connected, checked cluster."""

    client: Client
    serving: Mapping[str, str]
    """For each hardware class the class whose workers serve it."""

    @property
    def address(self) -> str:
        scheduler = self.client.scheduler
        assert scheduler is not None, "the client was closed"
        return str(scheduler.address)

    def task_runner(self) -> TaskRunner[Any]:
        """A new runner for one flow: stages go to the class that their ``pool:<class>`` tag names."""
        return PoolTaskRunner(self.address, serving=dict(self.serving))


@contextmanager
def run_pools(config: PoolsConfig, state: Path) -> Iterator[RunPools]:
    """Open (or attach to) the pools of a run; raises within a bounded time when a class has no workers."""
    logs = state / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    env = {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "HF_HUB_OFFLINE": "1"}
    if CONSOLE_LEVEL in os.environ:
        env[CONSOLE_LEVEL] = os.environ[CONSOLE_LEVEL]
    with open_pools(config, env=env, preload_modules=PRELOAD, log_path=logs / f"dask-{os.getpid()}.log") as client:
        checked = check_pools(client, config)
        ahead = _import_ahead(client, config, checked)
        yield RunPools(client, checked.serving)
        del ahead


def _import_ahead(client: Client, config: PoolsConfig, checked: ServingClasses) -> list[Future[Any]]:
    """Let workers import what their role needs (torch takes seconds) while the warm start still runs elsewhere."""
    return [
        client.submit(importlib.import_module, ROLE_MODULES[hardware_class.role], workers=[worker], pure=False)
        for name, hardware_class in config.classes.items()
        for worker in checked.workers_of(name)
    ]
