"""What does the control plane cost an iteration: everything that is neither rollout, scoring nor update?

``python -m benchmarks.overhead [--iterations 30]``: one training run as users start it, watched from outside. Wall: the
time from one iteration's record to the next, less the seconds in which the learner waited for rollouts, updated, and
wrote weights and checkpoint. CPU: the seconds of the driver, the Prefect server and the Dask
scheduler. Memory: the scheduler's resident set after every iteration.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from benchmarks.record import record
from benchmarks.training_run import train_in_process
from resources.pools.local_stack import local_stack
from resources.state_dir import state_dir

WORK = ("time/update_s", "weights/publish_s", "weights/checkpoint_s")
"""Seconds of an iteration that are update or data, measured inside the stages. The switch of the engines is none of
them: it goes on beside the next update."""
SETTLED = 3
"""The first iterations hold cold starts; memory must be flat after them."""
CONTROL = {"driver": "flows.train", "server": "prefect server", "scheduler": "resources.pools.standing"}
"""Control-plane processes by a part of their command line."""


@dataclass
class Sample:
    at: float
    cpu_s: dict[str, float]
    scheduler_bytes: int


class Watcher(threading.Thread):
    """Samples CPU seconds and memory of the control-plane processes twice a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[Sample] = []
        self._stop_asked = threading.Event()

    def stop(self) -> None:
        self._stop_asked.set()
        self.join(10.0)

    def run(self) -> None:
        while not self._stop_asked.wait(0.5):
            cpu_s = dict.fromkeys(CONTROL, 0.0)
            scheduler_bytes = 0
            for process in psutil.Process().children(recursive=True) + _stack_processes():
                try:
                    command = " ".join(process.cmdline())
                    for role, mark in CONTROL.items():
                        if mark in command:
                            times = process.cpu_times()
                            cpu_s[role] += times.user + times.system
                            if role == "scheduler":
                                scheduler_bytes = max(scheduler_bytes, process.memory_info().rss)
                except (psutil.NoSuchProcess, psutil.ZombieProcess):
                    continue
            self.samples.append(Sample(time.time(), cpu_s, scheduler_bytes))

    def at(self, moment: float) -> Sample:
        """The last sample before a moment."""
        return max((s for s in self.samples if s.at <= moment), key=lambda s: s.at, default=self.samples[0])


def _stack_processes() -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if "prefect server" in " ".join(_command(p))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return []


def count_task_runs(api_url: str, num_iterations: int) -> float:
    """Mean number of Prefect task runs of one `rl-iteration` flow run; the server holds one run's only."""
    answer = httpx.post(
        f"{api_url}/task_runs/count", json={"flows": {"name": {"any_": ["rl-iteration"]}}}, timeout=30.0
    )
    answer.raise_for_status()
    return answer.json() / num_iterations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    extra: dict[str, Any] = dict(item.split("=", 1) for item in options.set)
    store = str(state_dir() / "store")
    with tempfile.TemporaryDirectory(prefix="rollart-overhead-") as folder:
        # A server of this benchmark's own, so that every rl-iteration in it belongs to the run that is measured.
        os.environ["ROLLART_STATE_DIR"] = folder
        with local_stack(folder, work_pools={"rewards": 4}) as stack:
            watcher = Watcher()
            watcher.start()
            try:
                summary = train_in_process(
                    {
                        "num_iterations": options.iterations,
                        "store": store,
                        "evaluation.before": "false",
                        "evaluation.after": "false",
                        **extra,
                    }
                )
            finally:
                watcher.stop()
            task_runs = count_task_runs(stack.api_url, options.iterations)
    rows = summary["rows"]
    table = []
    for before, row in zip(rows[SETTLED - 1 :], rows[SETTLED:], strict=False):
        period = row["recorded_at"] - before["recorded_at"]
        waited_s = min(row["time/waited_s"], row["time/collect_s"])  # a wait beside the update before costs nothing
        first, last = watcher.at(before["recorded_at"]), watcher.at(row["recorded_at"])
        table.append(
            {
                "iteration": row["iteration"],
                "period_s": period,
                "control_wall_s": period - waited_s - sum(row[name] for name in WORK),
                **{f"{role}_cpu_s": last.cpu_s[role] - first.cpu_s[role] for role in CONTROL},
                "scheduler_mib": last.scheduler_bytes / 2**20,
            }
        )
    medians = {name: statistics.median(row[name] for row in table) for name in table[0]}
    record(
        "overhead",
        [*table, {**medians, "iteration": "median"}],
        {
            "task_runs_per_iteration": {"value": task_runs, "bound": 20.0, "unit": "Prefect task runs"},
            "control_plane_s_per_iteration": {"value": medians["control_wall_s"], "bound": 0.0, "unit": "s of wall"},
            "control_plane_cpu_s_per_iteration": {
                "value": sum(medians[f"{role}_cpu_s"] for role in CONTROL),
                "bound": 0.0,
                "unit": "s of CPU",
            },
            "scheduler_growth_mib": {
                "value": table[-1]["scheduler_mib"] - table[0]["scheduler_mib"],
                "bound": 0.0,
                "unit": f"MiB from iteration {SETTLED + 1} to {options.iterations}",
            },
        },
    )


if __name__ == "__main__":
    main()
