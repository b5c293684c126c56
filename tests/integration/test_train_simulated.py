"""`train` with simulated engines and a simulated learner: the real control plane, through Prefect and Dask, end to end
in seconds, from a policy directory that holds a tokenizer and nothing else. One engine lies about its version."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.server import prefect_server
from flows.train import train
from resources.object_store import ObjectStore
from resources.runs import find_run, iterations
from resources.telemetry.metrics import read_metrics
from resources.weights.store import WeightStore
from tests.integration.stack_runs import (
    assert_stages_ran_on_their_workers,
    flow_run_named,
    lags_of_trained_tokens,
    small_config,
    trajectory_rows,
)
from tests.model_directories import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCALE = 20.0
NUM_ITERATIONS = 3
NUM_PARAMETERS = 1e9
LOAD_BYTES_PER_S = 1e9


def test_a_simulated_run_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLART_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    accelerator = {
        "flops_per_s": 1e14, "bytes_per_s": 1e12, "memory_bytes": 2e10, "load_bytes_per_s": LOAD_BYTES_PER_S,
    }  # fmt: skip
    shared = {"time_scale": SCALE, "num_parameters": NUM_PARAMETERS}
    family = {"environment": "guess_number", "groups_per_iteration": 2, "group_size": 4, "max_new_tokens": 8}
    liar = {"kind": "wrong_version", "engine": "compute-0", "after_requests": 10, "duration_s": 10}
    config = small_config(
        tmp_path / "store",
        "simulated",
        num_iterations=NUM_ITERATIONS,
        policy={"model_directory": str(write_tokenizer(tmp_path / "policy"))},
        warm_start=None,
        families={
            "one": {**family, "hardware_class": "compute"},
            "two": {**family, "hardware_class": "bandwidth"},
        },
        engine={
            "backend": "simulated",
            "context_length": 256,
            "simulated": {
                **shared,
                "hardware": {"compute": accelerator, "bandwidth": accelerator},
                "answers": {"mean_tokens": 6},
                "faults": [liar],
            },
        },
        training={"backend": "simulated", "simulated": shared},
        evaluation={"num_episodes": 4, "before": False},
    )
    with prefect_server():
        summary = train(config)
        assert_stages_ran_on_their_workers(flow_run_named("train", "simulated"), NUM_ITERATIONS)

    store = ObjectStore.open(str(tmp_path / "store"))
    run = find_run(store.url, summary["run_id"])
    assert iterations(run) == list(range(NUM_ITERATIONS))
    assert WeightStore(store, run.run_id).versions() == list(range(NUM_ITERATIONS + 1))
    rows = read_metrics(run.folder())
    transfer_s = 2 * NUM_PARAMETERS / LOAD_BYTES_PER_S / SCALE
    for version, row in enumerate(rows):
        assert row["num_groups"] == 4 and row["weights/version"] == version + 1
        assert row["weights/total_s"] >= transfer_s * 0.99, "the size that is simulated, not that of the file"
        assert row["weights/load_s"] < transfer_s / 2, "it was prefetched"
    assert rows[-1]["optimizer_steps/total"] == NUM_ITERATIONS * config.training.minibatches
    lags = lags_of_trained_tokens(store, run.run_id)
    assert lags and min(lags) >= 0 and max(lags) <= 1
    (worker,) = rows[-1]["workers"]
    assert worker["proxy"]["engines"]["engine-compute-0"]["num_refused"] > 0
    assert worker["proxy"]["num_rerouted"] > 0
    sampled = trajectory_rows(store, run.run_id)
    assert max(max(versions) for versions in sampled["token_versions"].to_pylist()) <= NUM_ITERATIONS
    assert set(summary["success_after"]) == {"one", "two", "mean"}
