"""Bad input on the command line: exit code 2, one clear line, and nothing was started."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flows.command_line import main
from flows.config import RunConfig
from flows.opening import open_run
from resources.pools.stack_command import main as stack_command
from resources.runs import write_iteration


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder that must stay untouched: whatever starts writes its log there."""
    monkeypatch.setenv("ROLLART_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")  # or main() would leave it set
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path / "state"
    signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "state" / "logs").exists(), "something was started"


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command line says when it refuses its arguments."""
    assert main(list(arguments)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    return said


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("num_iteration=3", "error: num_iteration: Extra inputs are not permitted"),
        ("traning.minibatches=2", "'traning' does not exist; known: ["),
        ("families.frozen_lake.hardware_class=h100", "is 'h100', which no engine pool provides; allowed: ['compute', "),
        ("num_iterations=0", "error: num_iterations: Input should be greater than or equal to 1"),
        ("rollout.max_staleness=0", "set rollout.pipeline to 'synchronous'"),
        ("seed=[1", "override 'seed': '[1' cannot be read as YAML"),
        ("families.frozen_lake.environment=frozen_pond", "families.frozen_lake: environment 'frozen_pond' is unknown"),
        ("policy.model_directory=/no/such/model", "/no/such/model"),
        ("store=/proc/no/store", "/proc/no/store"),
        ("store=ftp://host/store", "ftp"),
        ("name=Bad Name", "name is 'Bad Name'; allowed are 1 to 40 of a-z"),
        ("pools.address=127.0.0.1:8786", "it must look like tcp://host:port"),
    ],
)
def test_a_bad_override_is_named(capsys: pytest.CaptureFixture[str], store: str, assignment: str, message: str) -> None:
    assert message in refused(capsys, "--set", f"store={store}", "--set", assignment)


def test_an_assignment_without_a_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--set", "seed"])
    assert ended.value.code == 2
    assert "write it as KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist; an example is examples/quickstart/run.yaml"),
        ("seed: [1", "is not YAML"),
        ("- a list", "holds a list; it must be a mapping of RunConfig's fields"),
        ("sed: 1", "sed: Extra inputs are not permitted"),
    ],
)
def test_a_bad_run_file_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, message: str
) -> None:
    run_file = tmp_path / "run.yaml"
    if text is not None:
        run_file.write_text(text)
    said = refused(capsys, str(run_file))
    assert message in said
    assert text == "sed: 1" or str(run_file) in said


def test_a_resume_of_nothing_is_refused(capsys: pytest.CaptureFixture[str], store: str, tmp_path: Path) -> None:
    assert "holds no run yet" in refused(capsys, "--resume", "latest", "--set", f"store={store}")
    config = RunConfig(store=store, num_iterations=2)
    with open_run(config, None) as (run, _):
        pass
    said = refused(capsys, "--resume", "nosuch", "--set", f"store={store}")
    assert "run 'nosuch' is not in the store" in said and run.run_id in said
    for iteration in (0, 1):
        write_iteration(run, iteration, {"version": iteration + 1, "queue_state": {"version": iteration + 1}})
    run.folder().put_json("summary.json", {"num_iterations": 2})
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump({"store": store, "num_iterations": 2}))
    before = sorted(os.listdir(f"{store}/runs/{run.run_id}"))
    said = refused(capsys, str(run_file), "--resume", "latest")
    assert "has 2 iterations and num_iterations is 2: nothing is left to do" in said
    said = refused(capsys, str(run_file), "--resume", "latest", "--set", "seed=9")
    assert "cannot be resumed with another seed" in said
    left = sorted(os.listdir(f"{store}/runs/{run.run_id}"))
    assert {"config.json", "iterations", "summary.json"} <= set(left) and left == before, "something was changed"


def test_a_server_that_does_not_answer_is_named(
    capsys: pytest.CaptureFixture[str], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    # Prefect reads its settings once; a process that starts with PREFECT_API_URL has them like this.
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert main(["--set", f"store={store}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: no Prefect server answers at http://127.0.0.1:9/api")
    assert "prefect config unset PREFECT_API_URL" in said


def test_a_busy_port_is_refused(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert stack_command(["up", "--port", str(port), "--state-dir", str(state)]) == 2
    assert f"error: port {port} of 127.0.0.1 is in use" in capsys.readouterr().err
    (state / "logs").rmdir()  # it was made to be empty
