"""How each side of `benchmarks.peers` is run: a process of its own, alone on the machine, with a deadline."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers_spec import PeerResult, PeerSpec, UpdateRecord
from resources.runs import find_run
from resources.telemetry.metrics import read_metrics
from resources.weights.store import WeightStore

CHECKOUT = Path(__file__).resolve().parent.parent
TRL = "trl==1.16.*"
SHARED_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "accelerate", "numpy", "pyarrow", "gymnasium", "pydantic",
    "psutil", "pyyaml",
)  # fmt: skip
"""TRL's environment gets these at the versions that the project itself runs on."""
INSTALL_S = 1800.0
GRACE_S = 15.0
"""A process that is past its deadline has this long to clean up after SIGTERM."""


class SideFailed(RuntimeError):
    """A side did not finish; the message names it and ends with the last lines of its log."""


def run_process(
    what: str, command: Sequence[str], environment: Mapping[str, str], log: Path, timeout_s: float
) -> float:
    """Run to the end in a session of its own; output goes to ``log``. Returns wall seconds.

    Raises SideFailed when it fails or is not done after ``timeout_s`` (it is ended then: SIGTERM, later SIGKILL).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            list(command),
            cwd=CHECKOUT,
            env=dict(environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except BaseException as error:
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise  # Ctrl-C of the benchmark: nothing it started stays behind
            raise SideFailed(f"{what} was not done after {timeout_s:.0f} s\n{_tail(log)}") from None
    if code:
        raise SideFailed(f"{what} ended with code {code}\n{_tail(log)}")
    return time.perf_counter() - started


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(GRACE_S)


def _tail(log: Path, num_lines: int = 25) -> str:
    return f"last lines of {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def process_environment(num_threads: int, **more: str) -> dict[str, str]:
    """The caller's environment for a process with so many torch threads. The wait policy of OpenMP is left at its
    default, which suits a process that has the machine to itself."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    fixed = {"OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**environment, **fixed, "PYTHONPATH": str(CHECKOUT), **more}


def trl_interpreter(environments: Path) -> Path:
    """Python of TRL's own virtual environment; made on first use (about 1.2 GB, some minutes), then kept."""
    pins = [f"{name}=={importlib.metadata.version(name).split('+')[0]}" for name in SHARED_PACKAGES]
    packages = [TRL, *pins]
    folder = environments / "trl"
    python = folder / "bin" / "python"
    marker = folder / ".installed"
    wanted = hashlib.sha256("\n".join(packages).encode()).hexdigest()
    if marker.exists() and marker.read_text() == wanted:
        return python
    print(f"installing {TRL} into {folder} (once)", flush=True)
    log = environments / "trl-install.log"
    if not python.exists():
        command = [sys.executable, "-m", "venv", str(folder)]
        run_process("making TRL's environment", command, os.environ, log, INSTALL_S)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    run_process("installing TRL", command, os.environ, log, INSTALL_S)
    marker.write_text(wanted)
    return python


def measure_peer(
    name: str, interpreter: str | Path, module: Sequence[str], spec: PeerSpec, folder: Path, timeout_s: float
) -> tuple[PeerResult, float]:
    """Run ``python -m <module> SPEC RESULT``. Returns what it measured and the wall seconds of the whole process."""
    spec_path, result_path = folder / f"{name}.spec.json", folder / f"{name}.result.json"
    folder.mkdir(parents=True, exist_ok=True)
    spec_path.write_text(spec.model_dump_json())
    result_path.unlink(missing_ok=True)
    environment = process_environment(spec.num_threads, TRL_EXPERIMENTAL_SILENCE="1")
    command = [str(interpreter), "-m", *module, str(spec_path), str(result_path)]
    wall_s = run_process(name, command, environment, folder / f"{name}.log", timeout_s)
    return PeerResult.model_validate_json(result_path.read_text()), wall_s


def measure_rollart(
    run_file: Path, overrides: Mapping[str, str], store: Path, log: Path, timeout_s: float
) -> tuple[PeerResult, float]:
    """``python -m flows.train`` as a user runs it: its own Prefect server, Dask pools, reward replicas, store.

    An update ends when its iteration is recorded: trained, published, loaded by every engine.
    """
    sets = [item for key, value in {**overrides, "store": str(store)}.items() for item in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "flows.train", str(run_file), *sets]
    wall_s = run_process("rollart", command, process_environment(1, OMP_WAIT_POLICY="PASSIVE"), log, timeout_s)
    run = find_run(str(store), "latest")
    records = [record_of(row) for row in read_metrics(run.folder())]
    weights = WeightStore(run.root(), run.run_id)
    version = weights.latest()
    assert version is not None and version == len(records), (version, len(records))
    return PeerResult(updates=records, model_directory=str(weights.directory(version))), wall_s


def record_of(row: Mapping[str, Any]) -> UpdateRecord:
    """The record of one of rollart's metrics rows."""
    prefix = "success/"
    return UpdateRecord(
        ended_at_s=row["recorded_at"],
        num_trajectories=row["num_trajectories"],
        num_sampled_tokens=row["num_sampled_tokens"],
        success={key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)},
    )


def warm_started_policy(run_file: Path, log: Path, timeout_s: float) -> Path:
    """Directory of the run file's warm-started policy: the one that the project's store holds, or a new one."""
    program = (
        "import pathlib, sys\n"
        "from flows.config import load_run_file\n"
        "from flows.warm_start import warm_start\n"
        "pathlib.Path(sys.argv[2]).write_text(warm_start(load_run_file(sys.argv[1])))\n"
    )
    answer = log.with_suffix(".directory")
    command = [sys.executable, "-c", program, str(run_file), str(answer)]
    run_process("the warm start", command, process_environment(1, OMP_WAIT_POLICY="PASSIVE"), log, timeout_s)
    directory = Path(answer.read_text())
    if not (directory / "config.json").exists():
        raise SideFailed(f"the warm start left no model directory\n{_tail(log)}")
    return directory
