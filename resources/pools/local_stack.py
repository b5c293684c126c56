"""How does a driver get the Prefect server and the workers of this machine, shared with every other driver here?

``with local_stack(state_dir) as stack: stack.api_url``. The first driver starts a supervisor
(`resources.pools.supervisor`), later ones share it; what it owns ends with the last of them. ``python -m
resources.pools.local_stack up`` makes the stack stand until ``down``.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.pools.prefect_processes import HOST, is_free
from resources.pools.processes import is_gone
from resources.pools.stack_layout import StackLayout

START_TIMEOUT_S = 90.0
DOWN_S = 15.0
"""Longest wait for the processes of a stack to be gone."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class LocalStack:
    """A stack that this process holds a lease on."""

    api_url: str
    state_dir: Path
    supervisor_pid: int
    dask_address: str
    """Address of the standing Dask cluster; empty when the stack has none."""

    @property
    def ui_url(self) -> str:
        return self.api_url.removesuffix("/api")


@contextmanager
def local_stack(
    state_dir: str | os.PathLike[str],
    *,
    port: int | None = None,
    work_pools: Mapping[str, int] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[LocalStack]:
    """Hold a lease on the local stack of a state folder; start it when nobody has.

    Args:
        state_dir: holds the Prefect database (so the history stays in one place), logs and the supervisor's socket.
        port: port of the Prefect server when this call starts it; None takes a free one. A stack that runs already
            keeps its own.
        work_pools: process work pools that need a worker, with the number of runs that it may start at once.
        start_timeout_s: longest wait for the server, in seconds.

    Raises:
        ValueError: the state folder cannot be written, or the port is in use; nothing was started.
        InfrastructureFailure: a process of the stack ended while starting; the message holds the end of its log.
        DeadlineExceeded: the stack was not ready in time.
    """
    layout = StackLayout.prepare(state_dir)
    message = {"op": "lease", "pid": os.getpid(), "work_pools": dict(work_pools or {})}
    connection, status = _reach(layout, message, port, start_timeout_s)
    try:
        yield _as_stack(status)
    finally:
        connection.close()


def stand(
    state_dir: str | os.PathLike[str],
    *,
    port: int | None = None,
    work_pools: Mapping[str, int] | None = None,
    dask_arguments: list[str] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> LocalStack:
    """Make the stack stand without a lease until `take_down`; with a Dask cluster when ``dask_arguments`` is given
    (arguments of ``python -m resources.pools.standing``). Raises like `local_stack`."""
    layout = StackLayout.prepare(state_dir)
    message = {"op": "stand", "pid": os.getpid(), "work_pools": dict(work_pools or {}), "dask": dask_arguments}
    connection, status = _reach(layout, message, port, start_timeout_s)
    connection.close()
    return _as_stack(status)


def read_status(state_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What the stack of a state folder runs; None when there is none."""
    answer = _ask(StackLayout(Path(state_dir).expanduser().resolve()), {"op": "status"}, 10.0)
    if answer is None:
        return None
    answer[0].close()
    return answer[1]


def take_down(state_dir: str | os.PathLike[str], *, now: bool = False) -> list[int]:
    """Let a standing stack end, and wait until every process of it is gone.

    Args:
        now: end it although drivers still hold leases.

    Returns:
        The pids of drivers that still use the stack: it ends with the last of them. Empty when it has ended.

    Raises:
        InfrastructureFailure: a process is still there after `DOWN_S` seconds; names its pid.
    """
    answer = _ask(StackLayout(Path(state_dir).expanduser().resolve()), {"op": "down", "now": now}, 10.0)
    if answer is None:
        return []
    connection, status = answer
    connection.close()
    if status["leases"] and not now:
        return status["leases"]
    pids = [status["pid"], *status["children"].values()]
    deadline = time.monotonic() + DOWN_S
    while left := [pid for pid in pids if not is_gone(pid)]:
        if time.monotonic() > deadline:
            raise InfrastructureFailure(f"processes {left} of the stack are still there after {DOWN_S:g} s")
        time.sleep(POLL_S)
    return []


def _as_stack(status: Mapping[str, Any]) -> LocalStack:
    return LocalStack(status["api_url"], Path(status["state_dir"]), status["pid"], status["dask_address"])


def _reach(
    layout: StackLayout, message: dict[str, Any], port: int | None, timeout_s: float
) -> tuple[socket.socket, dict[str, Any]]:
    """The supervisor's answer; one that is just ending is waited for, and started anew."""
    deadline = time.monotonic() + timeout_s
    with layout.start_lock.open("a") as lock:
        _take(lock.fileno(), deadline)
        while True:
            answer = _ask(layout, message, max(deadline - time.monotonic(), 0.1))
            if answer is not None:
                break
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the local stack of {layout.state_dir} was not there within {timeout_s:g} s; the end of its log:\n"
                    f"{layout.tail('supervisor')}"
                )
            _start_supervisor(layout, port, deadline)
    connection, status = answer
    if status["error"]:
        connection.close()
        raise InfrastructureFailure(status["error"])
    return connection, status


def _take(lock: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    "another process is starting the local stack and does not come to an end"
                ) from None
            time.sleep(POLL_S)


def _start_supervisor(layout: StackLayout, port: int | None, deadline: float) -> None:
    if port and not is_free(port):
        raise ValueError(
            f"port {port} of {HOST} is in use, so the Prefect server cannot listen there; choose another port, end "
            "what listens, or set PREFECT_API_URL if that is the server to use"
        )
    command = [sys.executable, "-m", "resources.pools.supervisor", "--state-dir", str(layout.state_dir)]
    command += ["--port", str(port or 0), "--start-timeout-s", f"{max(deadline - time.monotonic(), 1):.1f}"]
    with layout.log("supervisor").open("ab") as log:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True, timeout=30)
    path = layout.socket()
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _ask(layout: StackLayout, message: dict[str, Any], timeout_s: float) -> tuple[socket.socket, dict[str, Any]] | None:
    """Send a message and read the answer; None when no supervisor is there, or when it is just ending."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(layout.socket()))
        connection.sendall(json.dumps(message).encode() + b"\n")
        received = b""
        while not received.endswith(b"\n"):
            part = connection.recv(65536)
            if not part:
                connection.close()
                return None
            received += part
    except (FileNotFoundError, ConnectionError):
        connection.close()
        return None
    except TimeoutError:
        connection.close()
        raise DeadlineExceeded(
            f"the supervisor of the local stack of {layout.state_dir} did not answer within {timeout_s:.0f} s; "
            f"the end of its log:\n{layout.tail('supervisor')}"
        ) from None
    return connection, json.loads(received)


if __name__ == "__main__":
    from resources.pools.stack_command import main

    sys.exit(main())
