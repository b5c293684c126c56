"""Which reward components GDPO compares, and what it says when they are not there. Values: tests/golden."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.advantages.gdpo import GDPO
from tasks.training.algorithm_config import AdvantageConfig
from tasks.training.row import TrainingRow
from tests.unit.test_tasks_training_row import make_row

SOLVED, SOLVED_WITH_A_SLIP, FAILED, CUT = {"outcome": 1.0}, {"outcome": 1.0, "slip": -0.2}, {"outcome": 0.0}, {}


def group_of(*components: dict[str, float]) -> list[TrainingRow]:
    """One group; each reward is the sum of its components."""
    return [
        replace(make_row(member, reward=sum(parts.values()), group="maze-0"), reward_components=dict(parts))
        for member, parts in enumerate(components)
    ]


def estimate(rows: list[TrainingRow], **weights: float) -> Advantages:
    return GDPO(AdvantageConfig(estimator="gdpo", component_weights=weights)).estimate(AdvantageInputs.of(rows))


@pytest.mark.parametrize("weights", [{}, {"outcome": 1.0, "slip": 0.5}])
def test_a_component_that_a_rollout_does_not_name_is_0_there(weights: dict[str, float]) -> None:
    sparse = estimate(group_of(SOLVED, SOLVED_WITH_A_SLIP, FAILED, CUT), **weights)
    full = estimate(
        group_of(*({"outcome": outcome, "slip": slip} for outcome, slip in [(1, 0), (1, -0.2), (0, 0), (0, 0)])),
        **weights,
    )
    assert [values[5] for values in sparse.values_RT] == [values[5] for values in full.values_RT]
    solved, slipped, failed, cut = (float(values[5]) for values in sparse.values_RT)
    assert solved > slipped and solved > failed == cut and sparse.excluded_R == [None] * 4


def test_a_reward_that_no_component_explains_is_refused() -> None:
    rows = [*group_of(SOLVED, FAILED), replace(make_row(2, reward=0.5, group="maze-0"), reward_components={})]
    with pytest.raises(ValueError, match=r"\(maze\): its reward 0.5 has no components, and gdpo needs some"):
        estimate(rows)


def test_weights_of_which_a_family_has_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"maze have the components \['outcome', 'slip'\], and .* weighs \['speed'\]"):
        estimate(group_of(SOLVED_WITH_A_SLIP, FAILED), speed=1.0)


def test_a_weighed_component_that_nobody_has_yet_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    estimator = GDPO(AdvantageConfig(estimator="gdpo", component_weights={"outcome": 1.0, "slip": 1.0}))
    for _ in range(2):
        estimator.estimate(AdvantageInputs.of(group_of(SOLVED, FAILED)))
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "no trajectory of this update has the reward component 'slip'"
    ]


def test_a_group_without_any_component_and_with_rewards_of_0_is_dead() -> None:
    result = estimate([*group_of(CUT, CUT)])
    assert result.excluded_R == ["dead_group"] * 2 and result.num_dead_groups == {"maze": 1}
