"""Flat metrics of a batch."""

from __future__ import annotations

from resources.rollout.messages import Batch, BatchGroup, BatchMember
from resources.trajectories.trajectory import TrajectoryRef
from tasks.rollout.batch_metrics import batch_metrics


def test_counts_are_summed_histograms_merged_and_success_is_over_known_verdicts():
    members = tuple(
        BatchMember(str(i), TrajectoryRef("f", i), None, success, "environment", "1", 0)
        for i, success in enumerate([True, False, None])
    )
    batch = Batch(
        "run",
        3,
        (BatchGroup("a-0", "a", 0, members),),
        {
            **{"num_tokens/a": 5, "num_tokens/b": 7, "lag_max/a": 0, "lag_max/b": 1},
            **{"lag/a": {"0": 2}, "lag/b": {"0": 1, "1": 4}},
        },
    )
    metrics = batch_metrics(batch)
    assert metrics["num_tokens"] == 12
    assert metrics["num_tokens/a"] == 5
    assert metrics["staleness/lag_histogram"] == {"0": 3, "1": 4}
    assert metrics["success/a"] == 0.5
    assert "lag_max" not in metrics
