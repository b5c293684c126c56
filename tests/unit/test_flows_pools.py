"""What workers import ahead, and who waits for it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from distributed import TimeoutError as DaskTimeoutError

from flows.pools import PRELOAD, ROLE_IMPORTS, RunPools, _import_ahead, role_imports
from resources.failures import DeadlineExceeded
from resources.hardware import HardwareClass, PoolsConfig
from resources.pools.preflight import ServingClasses


class FinishedImport:
    def __init__(self) -> None:
        self.num_waits = 0

    def result(self, timeout: float) -> None:
        self.num_waits += 1


class HangingImport:
    def result(self, timeout: float) -> None:
        raise DaskTimeoutError


class RecordingClient:
    """Remembers what was submitted to which workers."""

    def __init__(self) -> None:
        self.submitted: list[tuple[list[str], list[str]]] = []

    def submit(self, function: Any, modules: list[str], *, workers: list[str], **options: Any) -> FinishedImport:
        self.submitted.append((modules, workers))
        return FinishedImport()


def test_a_worker_imports_in_one_call_whatever_its_classes() -> None:
    """Two threads that import transformers at once break its lazy modules: "cannot import name ..."."""
    config = PoolsConfig(
        classes={
            "compute": HardwareClass(role="engine"),
            "bandwidth": HardwareClass(role="engine", fallback=("compute",)),
            "learner": HardwareClass(role="learner"),
            "cpu": HardwareClass(role="environment"),
            "control": HardwareClass(role="control"),
        }
    )
    serving = {"compute": "compute", "bandwidth": "compute", "learner": "learner", "cpu": "cpu", "control": "cpu"}
    workers = {"compute": ("tcp://a",), "learner": ("tcp://a",), "cpu": ("tcp://b", "tcp://c")}
    client = RecordingClient()
    ahead = _import_ahead(client, config, ServingClasses(serving, workers), ROLE_IMPORTS)  # type: ignore[arg-type]
    engine, learner, environment, control = (
        [*ROLE_IMPORTS[role]] for role in ("engine", "learner", "environment", "control")
    )
    assert client.submitted == [
        (engine + engine + learner, ["tcp://a"]),
        (environment + control, ["tcp://b"]),
        (environment + control, ["tcp://c"]),
    ]
    assert ahead["engine"][0] is ahead["learner"][0], "whoever waits for either waits for the worker's one call"
    assert len(ahead["control"]) == 2


def test_a_role_waits_for_its_own_workers_only() -> None:
    learner, engine = FinishedImport(), FinishedImport()
    pools = RunPools(None, {}, {"learner": [learner], "engine": [engine]})  # type: ignore[arg-type, list-item]
    pools.wait_for_imports("learner")
    assert (learner.num_waits, engine.num_waits) == (1, 0)
    pools.wait_for_imports()
    assert (learner.num_waits, engine.num_waits) == (2, 1)


def test_an_import_that_hangs_is_named() -> None:
    pools = RunPools(None, {}, {"engine": [HangingImport()]})  # type: ignore[arg-type, list-item]
    with pytest.raises(
        DeadlineExceeded, match=r"role engine did not import .*resources\.engines\.local.* within 120 s"
    ):
        pools.wait_for_imports()


def test_only_the_learner_of_a_simulated_run_imports_torch() -> None:
    wanted = role_imports("simulated")
    names = [*PRELOAD, *wanted["engine"], *wanted["environment"], *wanted["control"]]
    code = (
        "import sys; from resources.pools.import_ahead import import_all; "
        f"import_all({names!r}); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert wanted["learner"] == role_imports("local")["learner"]


def test_engines_that_compute_import_what_computes() -> None:
    assert "resources.engines.local" in role_imports("local")["engine"]
