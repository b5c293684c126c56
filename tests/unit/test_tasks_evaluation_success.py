"""Success rates: unscored episodes are left out, never counted as failures."""

from __future__ import annotations

import pytest

from resources.rollout.messages import BatchGroup, BatchMember
from resources.trajectories.trajectory import TrajectoryRef
from tasks.evaluation.success import success_by_family


def group(family: str, *outcomes: bool | None) -> BatchGroup:
    members = tuple(
        BatchMember(f"{family}/{i}", TrajectoryRef("f", i), None, outcome, "environment", "1", 0)
        for i, outcome in enumerate(outcomes)
    )
    return BatchGroup(f"{family}-0", family, 0, members)


def test_rates_errors_and_mean():
    result = success_by_family([group("a", True, False, None, True), group("b", False)])
    assert result["success"] == {"a": pytest.approx(2 / 3), "b": 0.0}
    assert result["mean"] == pytest.approx(1 / 3)
    assert result["unscored"] == {"a": 1, "b": 0}
    assert result["num_episodes"] == {"a": 3, "b": 1}
    assert result["standard_error"]["a"] == pytest.approx((2 / 9 / 3) ** 0.5)


def test_a_family_without_any_verdict_is_an_error_and_not_a_made_up_rate():
    with pytest.raises(ValueError, match=r"\['b'\]"):
        success_by_family([group("a", True), group("b", None)])
    with pytest.raises(ValueError, match="any family"):
        success_by_family([])
