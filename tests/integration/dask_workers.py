"""The worker processes of a run's embedded cluster, from outside: who they are, and their sudden end."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed import Client, Nanny

from resources.pools.cluster import attach
from tests.integration.stack_processes import TrainProcess
from tests.integration.stack_runs import wait_for


def scheduler_address(state: Path, driver: TrainProcess) -> str:
    """Of the driver's embedded cluster, from its log."""
    log = state / "logs" / f"dask-{driver.process.pid}.log"

    def address() -> str | None:
        found = re.search(r"Dask scheduler at (\S+),", log.read_text() if log.exists() else "")
        return found.group(1) if found else None

    return wait_for("the cluster's address", lambda: driver.assert_runs() and address(), 120)


@contextmanager
def workers_of(state: Path, driver: TrainProcess) -> Iterator[Workers]:
    with attach(scheduler_address(state, driver)) as client:
        yield Workers(client)


class Workers:
    def __init__(self, client: Client) -> None:
        self._client = client

    def pids(self) -> dict[str, int]:
        """Worker process by name (``cpu-0``)."""
        names = {address: str(worker["name"]) for address, worker in self._client.scheduler_info()["workers"].items()}
        found: Any = self._client.run(os.getpid, workers=list(names), on_error="ignore")
        return {names[address]: pid for address, pid in found.items()}

    def run(self, function: Callable[..., Any], name: str) -> Any:
        """``function(dask_worker)`` in the worker of this name."""
        (address,) = [
            address
            for address, worker in self._client.scheduler_info()["workers"].items()
            if str(worker["name"]) == name
        ]
        answers: Any = self._client.run(function, workers=[address])
        return answers[address]

    def take_away(self, name: str) -> None:
        """End a worker and its nanny: no other one takes its place."""
        self._client.run_on_scheduler(_close_nanny, name=name)

    def kill(self, name: str) -> int:
        """SIGKILL; returns the pid that it had."""
        pid = self.pids()[name]
        os.kill(pid, signal.SIGKILL)
        return pid


def _close_nanny(dask_scheduler: Any, name: str) -> None:
    """Nannies of an embedded cluster live in its scheduler's process."""
    (nanny,) = [each for each in Nanny._instances if each.name == name]
    dask_scheduler.loop.add_callback(nanny.close)
