"""Runs the command line as a user does, in a process of its own, and reads what it left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.record import median
from flows.config import RunConfig
from resources.object_store import ObjectStore

QUICKSTART = Path(__file__).resolve().parent.parent / "examples" / "quickstart" / "run.yaml"
RUN_TIMEOUT_S = 1800.0


def train_in_process(overrides: dict[str, Any], run_file: Path = QUICKSTART) -> dict[str, Any]:
    """Train with ``overrides`` (dotted keys) and return the run's ``summary.json`` with its metrics rows as ``rows``.

    Raises RuntimeError with the end of the output when the run fails, and subprocess.TimeoutExpired after half an hour.
    """
    command = [sys.executable, "-m", "flows.train", str(run_file)]
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if done.returncode != 0:
        output = f"{done.stdout[-3000:]}{done.stderr[-6000:]}"
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{output}")
    store = ObjectStore.open(overrides.get("store", RunConfig().store))
    folder = store.sub(f"runs/{store.get_json('latest_run.json')['run_id']}")
    rows = [folder.get_json(key) for key in folder.list("metrics/")]
    return {**folder.get_json("summary.json"), "rows": rows}


def iteration_period_s(rows: Sequence[Mapping[str, Any]]) -> float:
    """Median seconds from one iteration's record to the next one's, of a run's metrics rows (two at least): what an
    iteration takes, whether iterations overlap or not."""
    recorded = [row["recorded_at"] for row in rows]
    return median([after - before for before, after in pairwise(recorded)])
