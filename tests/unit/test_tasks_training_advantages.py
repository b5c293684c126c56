"""GRPO advantages: M1, M2, M3, M14, S4, and the float64 values of tests/golden."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.advantages.grpo import GRPO
from tasks.training.algorithms import Algorithms
from tasks.training.config import AdvantageConfig, TrainingConfig
from tests.unit.test_tasks_training_row import make_row

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "training.json").read_text())


def estimate(*groups: list[float | None], scaling: str = "group", epsilon: float = 1e-4) -> Advantages:
    rows = [
        make_row(member, reward=reward, group=f"maze-{number}")
        for number, group in enumerate(groups)
        for member, reward in enumerate(group)
    ]
    return GRPO(AdvantageConfig(scaling=scaling, epsilon=epsilon)).estimate(AdvantageInputs.of(rows))


def firsts(advantages: Advantages) -> list[float]:
    return [float(values[0]) for values in advantages.values_RT]


def test_m1_equal_rewards_give_exactly_zero_and_dead_groups() -> None:
    """M1: [2,2,2,2] and [-8,-8,-8,-8]: advantages exactly 0, every group dead."""
    for scaling in ("group", "none"):
        result = estimate([2.0] * 4, [-8.0] * 4, scaling=scaling)
        assert firsts(result) == [0.0] * 8
        assert result.excluded_R == ["dead_group"] * 8
        assert result.num_groups == {"maze": 2} and result.num_dead_groups == {"maze": 2}


def test_m1_equal_rewards_that_only_rounding_tells_apart_are_dead() -> None:
    result = estimate([0.1 + 0.2, 0.3, float(np.float32(0.3)), 0.3])
    assert firsts(result) == [0.0] * 4 and result.num_dead_groups == {"maze": 1}


def test_m2_an_odd_one_out_is_bounded() -> None:
    """M2: [0.35 x 7, 0.0] in float32: the residue of the equal rewards never blows up a quotient."""
    rewards: list[float | None] = [float(np.float32(0.35))] * 7 + [0.0]
    unscaled = firsts(estimate(rewards, scaling="none"))
    assert unscaled[-1] == pytest.approx(-0.35 * 7 / 8, rel=1e-6)
    scaled = firsts(estimate(rewards, epsilon=0.0))
    assert scaled[-1] == pytest.approx(-math.sqrt(7), rel=1e-6)
    assert scaled[:-1] == pytest.approx([1 / math.sqrt(7)] * 7, rel=1e-6)


@pytest.mark.parametrize("normalisation", ["none", "batch"])
def test_m2_an_odd_one_out_against_the_others_is_bounded(normalisation) -> None:
    """M2, leave-one-out: -0.35 against the mean of the others; normalised, a bounded multiple of it."""
    config = AdvantageConfig(estimator="rloo", normalisation=normalisation)
    rewards = [float(np.float32(0.35))] * 7 + [0.0]
    rows = [make_row(i, reward=reward) for i, reward in enumerate(rewards)]
    estimated = Algorithms(TrainingConfig(advantage=config)).estimate(AdvantageInputs.of(rows))
    values = [float(values[5]) for values in estimated.values_RT]  # a trained token
    if normalisation == "none":
        assert values == pytest.approx([0.05] * 7 + [-0.35], rel=1e-6)
    else:
        assert values == pytest.approx([1 / math.sqrt(7)] * 7 + [-math.sqrt(7)], rel=1e-5)


def test_m3_unscored_members_leave_the_statistics() -> None:
    """M3: [unscored, -1, -1, -1]: the unscored one gets 0, the others are equal: a dead group."""
    result = estimate([None, -1.0, -1.0, -1.0])
    assert firsts(result) == [0.0] * 4
    assert result.excluded_R == ["unscored", "dead_group", "dead_group", "dead_group"]
    assert result.num_unscored == 1 and result.num_rollouts == 4


def test_s4_statistics_over_the_scored_ones() -> None:
    """S4: [1, 1, dead, 0]: mean 2/3 and deviation sqrt(2)/3 over [1, 1, 0]."""
    result = estimate([1.0, 1.0, None, 0.0], epsilon=0.0)
    root = math.sqrt(2)
    assert firsts(result) == pytest.approx([1 / root, 1 / root, 0.0, -root], rel=1e-6)
    assert result.excluded_R == [None, None, "unscored", None]


def test_one_scored_member_has_nothing_to_be_compared_with() -> None:
    result = estimate([1.0, None, None])
    assert result.excluded_R == ["dead_group", "unscored", "unscored"]
    assert result.num_dead_groups == {"maze": 1}


def test_a_group_without_any_score_is_no_group() -> None:
    result = estimate([None, None])
    assert result.num_groups == {"maze": 0} and result.num_dead_groups == {"maze": 0}
    assert result.excluded_R == ["unscored", "unscored"]


def test_m14_rows_of_one_rollout_count_once() -> None:
    """M14: A: one row, reward 1; B: four rows, reward 0: baseline 0.5, not 0.2."""
    rows = [make_row(0, reward=1.0, rollout="A")] + [make_row(1 + i, reward=0.0, rollout="B") for i in range(4)]
    result = GRPO(AdvantageConfig(scaling="none")).estimate(AdvantageInputs.of(rows))
    assert firsts(result) == [0.5, -0.5, -0.5, -0.5, -0.5]
    assert result.num_rollouts == 2


def test_rows_of_one_rollout_with_two_rewards_are_refused() -> None:
    rows = [make_row(0, reward=1.0, rollout="A"), make_row(1, reward=0.0, rollout="A")]
    with pytest.raises(ValueError, match=r"rollout A has rows with rewards 1\.0 and 0\.0"):
        GRPO(AdvantageConfig()).estimate(AdvantageInputs.of(rows))


@pytest.mark.parametrize("case", GOLDEN["grpo"])
def test_golden_values(case: dict) -> None:
    result = estimate(case["rewards"], scaling=case["scaling"], epsilon=case["epsilon"])
    assert firsts(result) == pytest.approx(case["advantages"], rel=1e-6, abs=1e-7)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3, allow_nan=False)), min_size=1, max_size=9),
    st.sampled_from(["group", "none"]),
)
def test_advantages_are_centred_and_bounded(rewards: list[float | None], scaling: str) -> None:
    result = estimate(rewards, scaling=scaling)
    values = np.array(firsts(result), np.float64)
    assert np.isfinite(values).all()
    assert abs(values.sum()) <= 1e-5 * max(1.0, np.abs(values).sum())
    if scaling == "group":
        assert np.abs(values).max() <= math.sqrt(len(rewards)) + 1e-6
