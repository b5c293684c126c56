"""Who owns the processes of a local stack: tests with real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from resources.failures import InfrastructureFailure
from resources.pools.local_stack import local_stack, read_status, take_down
from resources.pools.prefect_processes import HOST, is_healthy
from resources.pools.processes import is_gone
from resources.pools.stack_layout import StackLayout

GONE_WITHIN_S = 10


class Driver:
    """A driver in a process of its own, and everything that belongs to it."""

    def __init__(self, state_dir: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.integration.stack_driver", str(state_dir), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        self.ready = json.loads(self.process.stdout.readline())

    def family(self) -> list[int]:
        """Pids of the driver, the supervisor, and all processes below either."""
        roots = [self.process.pid, self.ready["supervisor"]]
        return [*roots, *(each.pid for root in roots for each in psutil.Process(root).children(recursive=True))]

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(GONE_WITHIN_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def driver(state_dir: Path, *arguments: str) -> Iterator[Driver]:
    started = Driver(state_dir, *arguments)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.end(signal.SIGKILL)
        assert started.process.stdout is not None
        started.process.stdout.close()


def assert_gone(pids: list[int], within_s: float = GONE_WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if not is_gone(pid)]:
        assert time.monotonic() < deadline, f"still there: {[_described(pid) for pid in left]}"
        time.sleep(0.05)


def _described(pid: int) -> str:
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())}"
    except psutil.Error:
        return f"{pid} (ended this moment)"


def test_nothing_survives_a_killed_driver(tmp_path: Path) -> None:
    """S7: server, work-pool worker, Dask scheduler and worker of a driver that got SIGKILL."""
    with driver(tmp_path, "--cluster", "--work-pool", "rewards") as one:
        one.wait_ready()
        deadline = time.monotonic() + 20
        worker_log = StackLayout(tmp_path).log("worker-rewards")
        while "started" not in worker_log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        family = one.family()
        assert len(family) >= 6, family
        one.end(signal.SIGKILL)
        assert_gone(family)


def test_drivers_share_a_stack_and_the_last_one_ends_it(tmp_path: Path) -> None:
    """Ctrl-C ends what belongs to one driver, SIGTERM of the last one ends everything."""
    with driver(tmp_path, "--cluster") as one, driver(tmp_path) as two:  # at once: one of them starts the supervisor
        one.wait_ready()
        two.wait_ready()
        assert one.ready == two.ready
        cluster = [each.pid for each in psutil.Process(one.process.pid).children(recursive=True)]
        family = [*one.family(), *two.family()]
        assert cluster
        one.end(signal.SIGINT)
        assert_gone(cluster)
        status = read_status(tmp_path)
        assert status is not None
        assert status["leases"] == [two.process.pid]
        assert is_healthy(int(two.ready["api_url"].rsplit(":", 1)[1].removesuffix("/api")))
        two.end(signal.SIGTERM)
        assert_gone(family)


def test_a_standing_stack_stands_until_it_is_taken_down(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "resources.pools.local_stack"]
    state = ["--state-dir", str(tmp_path)]
    environment = {**os.environ, "REWARD_POOL": "scores"}
    classes = ["--classes", "compute=1,bandwidth=0,learner=0,cpu=0,control=0", "--port", "0", "--work-pool", "scores=1"]
    up = subprocess.run([*command, "up", *state, *classes], capture_output=True, text=True, timeout=90, env=environment)
    assert up.returncode == 0, up.stderr
    status = read_status(tmp_path)
    assert status is not None and status["standing"]
    assert status["dask_address"] in up.stdout and status["api_url"] in up.stdout
    assert sorted(status["children"]) == ["dask", "prefect-server", "worker-scores"]
    family = [status["pid"], *(each.pid for each in psutil.Process(status["pid"]).children(recursive=True))]
    with local_stack(tmp_path) as stack:
        assert stack.dask_address == status["dask_address"]
        assert take_down(tmp_path) == [os.getpid()]  # it goes on for this process
        assert is_healthy(int(stack.api_url.rsplit(":", 1)[1].removesuffix("/api")))
    assert_gone(family)
    down = subprocess.run([*command, "down", *state], capture_output=True, text=True, timeout=30)
    assert (down.returncode, down.stdout) == (0, "nothing of the stack is left\n")
    assert read_status(tmp_path) is None


def test_a_busy_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind((HOST, 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of {HOST} is in use"):
            local_stack(tmp_path, port=port).__enter__()
    assert read_status(tmp_path) is None


def test_a_server_that_dies_while_starting_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "nonsense://nowhere")
    with pytest.raises(InfrastructureFailure, match=r"the Prefect server at .* ended with code") as caught:
        local_stack(tmp_path).__enter__()
    assert "nonsense" in str(caught.value)
    deadline = time.monotonic() + GONE_WITHIN_S
    while read_status(tmp_path) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
