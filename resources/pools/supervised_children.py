"""How are the processes below a supervisor started, started again, and ended?

Should the supervisor itself be killed, its children get SIGTERM from the kernel. That needs a supervisor whose first
thread starts them and lives as long as it does: the kernel sends the signal when the thread that started a child ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil

from resources.pools.prefect_processes import ChildCommand
from resources.pools.processes import end_all, is_gone, restore_interrupt
from resources.pools.stack_layout import StackLayout

logger = logging.getLogger("supervisor")

GRACE_S = 3.0
"""Between SIGTERM and SIGKILL."""
MAX_RESTARTS = 3
PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """A process below the supervisor; started again when it ends by itself, `MAX_RESTARTS` times."""

    command: ChildCommand
    process: subprocess.Popen[bytes]
    num_restarts: int = 0


class SupervisedChildren:
    """Children by name, and the orphans of theirs that this process adopts."""

    def __init__(self, layout: StackLayout) -> None:
        self._layout = layout
        self._children: dict[str, Child] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._children

    def pids(self) -> dict[str, int]:
        return {name: child.process.pid for name, child in self._children.items()}

    def exit_code(self, name: str) -> int | None:
        """None: it still runs."""
        return self._children[name].process.poll()

    def forget(self, name: str) -> None:
        """Ask it to end, and start it no more by itself: it never became ready."""
        self._children.pop(name).process.terminate()

    def start(self, command: ChildCommand, num_restarts: int = 0) -> None:
        """Start a process; its output is appended to the log of its name."""
        with self._layout.log(command.name).open("ab") as log:
            process = subprocess.Popen(
                command.arguments,
                env=dict(command.env),
                cwd=self._layout.state_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_prepare_child,
            )
        logger.info("started %s as process %d", command.name, process.pid)
        self._children[command.name] = Child(command, process, num_restarts)

    def restart_ended(self) -> None:
        """Start again what has ended by itself; not a Dask cluster, since the actors on it are gone with it."""
        for name, child in list(self._children.items()):
            if child.process.poll() is None or child.num_restarts >= MAX_RESTARTS or name == "dask":
                continue
            logger.error("%s ended with code %s; starting it again", name, child.process.returncode)
            self.start(child.command, child.num_restarts + 1)

    def reap_adopted(self) -> None:
        """Take note of the end of orphans that became children of this process."""
        own = {child.process.pid for child in self._children.values()}
        for process in psutil.Process().children():
            if process.pid not in own and is_gone(process.pid):
                try:
                    os.waitpid(process.pid, os.WNOHANG)
                except ChildProcessError:
                    continue

    def end(self) -> None:
        """End every process below. Workers first, so that they can still tell the server how their runs ended."""
        workers = [child.process for name, child in self._children.items() if name != "prefect-server"]
        for process in workers:
            process.terminate()
        deadline = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        killed = end_all(psutil.Process().children(), grace_s=GRACE_S)
        logger.info("ended; killed: %s", killed or "none")


def _prepare_child() -> None:
    restore_interrupt()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
