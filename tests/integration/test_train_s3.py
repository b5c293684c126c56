"""A short run whose store is an S3 bucket: trajectories, weights, batches and the reward queue all live there."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from resources.object_store import ObjectStore
from resources.pools.prefect_processes import free_port
from resources.runs import find_run, iterations
from resources.trajectories.batch import batch_versions
from resources.trajectories.rewards_view import rewards_table
from resources.weights.store import WeightStore
from tests.integration.stack_processes import assert_gone, driver_environment, train_process
from tests.integration.stack_runs import (
    lags_of_trained_tokens,
    sampled_versions,
    small_fields,
    trajectory_rows,
    wait_for,
)

pytestmark = [pytest.mark.s3, pytest.mark.slow, pytest.mark.timeout(900)]

BUCKET = "runs"


@pytest.fixture
def s3_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """moto in a process of its own; the AWS variables of this process, and of what it starts, point at it."""
    import boto3

    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as service:

        def answers() -> bool:
            assert service.poll() is None, "moto ended"
            try:
                with urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=5):
                    return True
            except OSError:
                return False

        try:
            wait_for("moto answers", answers, 60)
            boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
            yield
        finally:
            service.terminate()


def test_a_run_on_s3(s3_service: None, tmp_path: Path) -> None:
    fields = small_fields(
        f"s3://{BUCKET}/tests", "on-s3", num_iterations=2, evaluation={"after": False, "num_episodes": 2}
    )
    fields["families"] = {name: fields["families"][name] for name in ("guess_number", "calculator")}
    with train_process(fields, tmp_path, driver_environment(tmp_path / "state")) as driver:
        driver.wait(600)
        assert driver.process.returncode == 0, driver.output
    store = ObjectStore.open(f"s3://{BUCKET}/tests")
    run = find_run(store.url, "latest")
    summary = run.folder().get_json("summary.json")
    assert summary["store"] == f"s3://{BUCKET}/tests/runs/{run.run_id}"
    assert summary["num_trajectories"] == 2 * 3 * 4
    assert iterations(run) == batch_versions(store, run.run_id) == [0, 1]
    assert WeightStore(store, run.run_id).versions() == [0, 1, 2]
    assert set(lags_of_trained_tokens(store, run.run_id)) <= {0, 1}
    rows = trajectory_rows(store, run.run_id)
    assert sampled_versions(rows) <= {0, 1, 2}
    assert set(rewards_table(store, run.run_id)["scorer"].to_pylist()) == {"exact_answer"}
    assert not (tmp_path / "s3:").exists()
    assert_gone([driver.process.pid])
