"""`train` with cross-policy sampling: two simulated engines of a class, of which one loads every second version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flows.server import prefect_server
from flows.train import train
from resources.object_store import ObjectStore
from resources.runs import find_run
from resources.telemetry.metrics import read_metrics
from resources.trajectories.batch import batch_versions, read_batch
from resources.trajectories.store import read_trajectories
from tests.integration.stack_runs import lags_of_trained_tokens, small_config
from tests.model_directories import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ITERATIONS, EVERY, MAX_STALENESS = 4, 2, 1
SHARED = {"time_scale": 20.0, "num_parameters": 1e9}
ACCELERATOR = {"flops_per_s": 1e14, "bytes_per_s": 1e12, "memory_bytes": 2e10}


def test_turns_under_older_versions_are_trained_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLART_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    config = small_config(
        tmp_path / "store",
        "crossing",
        num_iterations=NUM_ITERATIONS,
        policy={"model_directory": str(write_tokenizer(tmp_path / "policy"))},
        warm_start=None,
        pools={
            "start_timeout_s": 240,
            "classes": {
                "compute": {"role": "engine", "num_workers": 2},
                "learner": {"role": "learner"},
                "cpu": {"role": "environment"},
                "control": {"role": "control"},
            },
        },
        families={
            "one": {
                "environment": "guess_number", "hardware_class": "compute", "groups_per_iteration": 2, "group_size": 4,
                "max_new_tokens": 8,
            }
        },
        rollout={
            "length_finish": "step",
            "max_staleness": MAX_STALENESS,
            "cross_policy": {"p_stale": 0.5, "refresh_every": EVERY},
        },
        engine={
            "backend": "simulated",
            "context_length": 256,
            "simulated": {**SHARED, "hardware": {"compute": ACCELERATOR}, "answers": {"mean_tokens": 6}},
        },
        training={"backend": "simulated", "simulated": SHARED},
        evaluation={"num_episodes": 4, "before": False},
    )  # fmt: skip
    with prefect_server():
        summary = train(config)

    store = ObjectStore.open(str(tmp_path / "store"))
    run_id = summary["run_id"]
    under: dict[str, set[int]] = {"compute-0": set(), "compute-1": set()}
    num_mixed = 0
    for version in batch_versions(store, run_id):
        members = [member for group in read_batch(store, run_id, version).groups for member in group.members]
        for row in read_trajectories(store, [member.ref for member in members]):
            num_mixed += len({turn.engine for turn in row.turns}) == 2
            for number, turn in enumerate(row.turns):
                is_stale = config.rollout.cross_policy.is_stale_turn(row.seed_sampling, number)
                assert turn.engine == ("compute-1" if is_stale else "compute-0")
                under[turn.engine] |= set(np.unique(row.token_versions[turn.action_start : turn.action_end]).tolist())
    assert num_mixed > 0
    assert under["compute-1"] == {0, EVERY}, "the stale engine held every second version only"
    assert under["compute-0"] >= {0, 1, 2}, "the current one all of them"
    lags = lags_of_trained_tokens(store, run_id)
    assert MAX_STALENESS < max(lags) <= config.rollout.lag_bound == MAX_STALENESS + EVERY - 1
    rows = read_metrics(find_run(store.url, run_id).folder())
    assert all(0 < row["cross_policy/turn_share"] < 1 and row["weights/total_s"] > 0 for row in rows)
    assert sum(row["cross_policy.unserved_turns"] for row in rows) == 0
    assert set(summary["success_after"]) == {"one", "mean"}
