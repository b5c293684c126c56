"""How does a run get its Dask cluster: one of its own on this machine, or a standing one by address?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from distributed import Client

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.hardware import PoolsConfig

CONNECT_S = 10.0
"""Longest wait for a scheduler to answer."""
CLOSE_S = 3.0
"""Longest wait for an embedded cluster to end before its processes are killed."""
LOG_TAIL_LINES = 15


@contextmanager
def open_pools(
    config: PoolsConfig,
    *,
    env: Mapping[str, str] | None = None,
    preload_modules: Iterable[str] = (),
    shared_modules: Iterable[str] = (),
    log_path: Path | None = None,
) -> Iterator[Client]:
    """The cluster that ``config`` asks for: `attach` with an address, `embedded_cluster` without."""
    if config.address is not None:
        with attach(config.address) as client:
            yield client
    else:
        with embedded_cluster(
            config, env=env, preload_modules=preload_modules, shared_modules=shared_modules, log_path=log_path
        ) as client:
            yield client


@contextmanager
def embedded_cluster(
    config: PoolsConfig,
    *,
    env: Mapping[str, str] | None = None,
    preload_modules: Iterable[str] = (),
    shared_modules: Iterable[str] = (),
    log_path: Path | None = None,
) -> Iterator[Client]:
    """Start a scheduler and the workers of every class on 127.0.0.1, end them with the block.

    They live in one process of their own (`resources.pools.standing`) and in worker processes below it, in a session
    of their own: Ctrl-C in the terminal reaches the driver only, which ends them in order; when the driver is killed
    they end by themselves within a second.

    Args:
        env: environment of every worker, e.g. ``PREFECT_API_URL``.
        preload_modules: what every worker imports before it takes work, so that the first stage starts at once.
        shared_modules: what is imported once besides, where workers are forked from one process (`forking`).
        log_path: where scheduler and workers write; a temporary file when None.

    Yields:
        A client (never the process's default one: that would win over every address given later). Its address is
        ``client.scheduler.address``.

    Raises:
        InfrastructureFailure: a process ended while starting; the message holds the end of the log.
        DeadlineExceeded: not every worker was there within ``config.start_timeout_s`` seconds.
    """
    env = dict(env or {})
    with tempfile.TemporaryDirectory(prefix="rollart-pools-") as folder:
        scheduler_file = Path(folder) / "scheduler.json"
        log_path = log_path or Path(folder) / "dask.log"
        command = [sys.executable, "-m", "resources.pools.standing", "--pools-json", config.model_dump_json()]
        command += ["--scheduler-file", str(scheduler_file), "--owner-pid", str(os.getpid())]
        command += [argument for module in preload_modules for argument in ("--preload", module)]
        command += [argument for module in shared_modules for argument in ("--share", module)]
        command += [argument for name in env for argument in ("--env", name)]
        with log_path.open("ab") as log:
            process = _start(command, env, log)
        try:
            address = _wait_for_address(process, scheduler_file, log_path, config.start_timeout_s)
            with attach(address) as client:
                yield client
        finally:
            _end(process)


@contextmanager
def attach(address: str, *, timeout_s: float = CONNECT_S) -> Iterator[Client]:
    """A client of the scheduler at ``address``, closed with the block.

    Raises:
        InfrastructureFailure: nothing answers there within ``timeout_s`` seconds.
    """
    try:
        client = Client(address, timeout=timeout_s, set_as_default=False, direct_to_workers=True)
    except (OSError, ValueError) as error:
        raise InfrastructureFailure(
            f"no Dask scheduler answers at {address} within {timeout_s:g} s; start one "
            "(python -m resources.pools.standing), or leave pools.address out for an embedded cluster"
        ) from error
    try:
        yield client
    finally:
        client.close(timeout=CONNECT_S)


def _start(command: list[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _wait_for_address(process: subprocess.Popen[bytes], file: Path, log_path: Path, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while not file.exists():
        if process.poll() is not None:
            raise InfrastructureFailure(
                f"the embedded Dask cluster ended with code {process.returncode} while starting; "
                f"the end of its log {log_path}:\n{_tail(log_path)}"
            )
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the workers of the embedded Dask cluster were not all there within {timeout_s:g} s "
                f"(pools.start_timeout_s); the end of the log {log_path}:\n{_tail(log_path)}"
            )
        time.sleep(0.02)
    return json.loads(file.read_text())["address"]


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its session: the workers are in it
        process.wait(CLOSE_S)
