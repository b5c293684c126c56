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


def test_shares_of_stale_engines_are_of_what_was_sampled():
    """In all: of all turns, not the mean of the families' shares; a family that sampled nothing has none."""
    counters = {
        **{"num_turns/a": 1, "num_turns/b": 4, "num_turns/c": 0},
        **{"cross_policy.stale_turns/a": 1, "cross_policy.stale_turns/b": 1, "cross_policy.stale_turns/c": 0},
        **{"num_sampled_tokens/a": 10, "num_sampled_tokens/b": 30, "cross_policy.stale_tokens/a": 10},
    }
    metrics = batch_metrics(Batch("run", 3, (), counters))
    shares = {name: value for name, value in metrics.items() if "_share" in name}
    assert shares == {
        **{"cross_policy/turn_share": 0.4, "cross_policy/turn_share/a": 1.0, "cross_policy/turn_share/b": 0.25},
        **{"cross_policy/token_share": 0.25, "cross_policy/token_share/a": 1.0},
    }
