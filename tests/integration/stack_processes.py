"""Drivers in processes of their own, as people start them, and whether anything of them is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml

from resources.pools.local_stack import read_status
from resources.pools.processes import is_gone

ROOT = Path(__file__).resolve().parents[2]
GONE_WITHIN_S = 10.0


def driver_environment(state_dir: Path, **more: str) -> dict[str, str]:
    """This process's environment, with a state folder and without a configured Prefect server."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", "PREFECT_API_KEY")}
    return {**kept, "ROLLART_STATE_DIR": str(state_dir), "OMP_NUM_THREADS": "1", **more}


class TrainProcess:
    """``python -m flows.train RUN_FILE ...`` with its output in a file."""

    def __init__(self, fields: Mapping[str, object], folder: Path, env: Mapping[str, str], *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        run_file = folder / "run.yaml"
        run_file.write_text(yaml.safe_dump(dict(fields)))
        self.output_path = folder / f"output-{time.time_ns()}.txt"
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.train", str(run_file), *arguments],
                cwd=ROOT,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def below(self) -> list[int]:
        """Pids of the driver and of everything below it."""
        return below(self.process.pid)

    def assert_runs(self) -> bool:
        """For waits: fails at once, with the output, when the driver has ended."""
        assert self.process.poll() is None, f"the driver ended with {self.process.returncode}:\n{self.output}"
        return True

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver did not end within {timeout_s:g} s:\n{self.output}") from None


@contextmanager
def train_process(
    fields: Mapping[str, object], folder: Path, env: Mapping[str, str], *arguments: str
) -> Iterator[TrainProcess]:
    """A driver that is killed, at the latest, with the block."""
    started = TrainProcess(fields, folder, env, *arguments)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait(GONE_WITHIN_S)


def below(pid: int) -> list[int]:
    """A process and its descendants."""
    return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]


def stack_pids(state_dir: Path) -> list[int]:
    """The supervisor of a state folder and everything below it: Prefect server, worker, reward replicas, Dask."""
    status = read_status(state_dir)
    assert status is not None, f"no stack runs for {state_dir}"
    return below(status["pid"])


def assert_gone(pids: list[int], within_s: float = GONE_WITHIN_S) -> None:
    """Every process has ended (zombies count as ended) within so many seconds from now."""
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if not is_gone(pid)]:
        assert time.monotonic() < deadline, f"still there after {within_s:g} s: {[_describe(pid) for pid in left]}"
        time.sleep(0.05)


def _describe(pid: int) -> str:
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())}"
    except psutil.Error:
        return str(pid)
