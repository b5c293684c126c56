"""Bad input in processes of their own: refused with a clear line before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.stack_processes import ROOT, driver_environment

CASES = {
    "unknown key": (("--set", "num_iteration=3"), {}, 2, "error: num_iteration: Extra inputs are not permitted"),
    "missing model": (("--set", "policy.model_directory=/no/such/model"), {}, 2, "/no/such/model"),
    "no server": ((), {"PREFECT_API_URL": "http://127.0.0.1:9/api"}, 1, "error: no Prefect server answers at"),
}


@pytest.mark.timeout(180)
def test_bad_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "flows.train", "--set", f"store={tmp_path / 'store'}", *arguments],
            cwd=ROOT,
            env=driver_environment(tmp_path / name, **more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (arguments, more, _, _) in CASES.items()
    }
    for name, process in started.items():
        _, said = process.communicate(timeout=120)
        _, _, code, message = CASES[name]
        assert (process.returncode, message in said) == (code, True), f"{name}: {said}"
        assert len(said.splitlines()) == 1, f"{name}: {said}"
        assert not (tmp_path / name / "logs").exists(), f"{name}: something was started"
