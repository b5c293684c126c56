"""Who is in a statistic and who pays which penalty, for every estimator: rollouts of several rows, members that do not
count, penalties by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.algorithm_config import AdvantageConfig, CorrectionConfig, CriticConfig
from tasks.training.algorithms import Algorithms
from tasks.training.config import TrainingConfig
from tasks.training.prepared import PreparedRows, prepare_rows
from tasks.training.row import TrainingRow, TurnSpan
from tests.unit.test_tasks_training_row import make_row

ALL: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, batch": {"scaling": "batch"},
    "grpo, none": {"scaling": "none"},
    "grpo, normalised by batch": {"normalisation": "batch"},
    "grpo, normalised by family": {"normalisation": "family"},
    "rloo": {"estimator": "rloo"},
    "reinforce_plus_plus": {"estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"estimator": "reinforce_plus_plus_baseline"},
    "gdpo": {"estimator": "gdpo"},
    "turn_returns": {"estimator": "turn_returns", "discount": 0.9},
    "gigpo": {"estimator": "gigpo", "discount": 0.9},
    "gae": {"estimator": "gae", "discount": 0.9, "normalisation": "batch"},
}


def estimate(inputs: AdvantageInputs, name: str) -> Advantages:
    critic = CriticConfig() if name == "gae" else None
    values = [np.zeros(len(row.token_ids), np.float32) for row in inputs.rows] if name == "gae" else None
    algorithms = Algorithms(TrainingConfig(advantage=AdvantageConfig(**ALL[name]), critic=critic))
    return algorithms.estimate(replace(inputs, values_RT=values))


def turns_row(index: int, reward: float | None, rollout: str, *inline: float, group: str = "maze-0") -> TrainingRow:
    """Turns of one token read, the same in every row, and two sampled ones."""
    length = 3 * len(inline)
    trained = tuple(t for t in range(length) if t % 3)
    row = make_row(index, length=length, trained=trained, reward=reward, rollout=rollout, group=group)
    row.token_ids[::3] = 7
    turns = tuple(TurnSpan(3 * t, 3 * t + 1, 3 * t + 3, value) for t, value in enumerate(inline))
    components = {"outcome": reward or 0.0, "format": float(index % 2)}
    return replace(row, turns=turns, reward_components=components)


def group_of_three() -> list[TrainingRow]:
    return [
        turns_row(0, 1.0, "a", 0.0, 0.2),
        turns_row(1, 0.0, "b", 0.0),
        turns_row(2, 0.4, "c", 0.1, 0.0, 0.0),
    ]


def inputs_of(rows: Sequence[TrainingRow], stale: Sequence[int] = ()) -> AdvantageInputs:
    inputs = AdvantageInputs.of(rows)
    for index in stale:
        inputs.trainable_RT[index][:] = False
        inputs.counted_R[index] = False
    return inputs


def trained_values(inputs: AdvantageInputs, found: Advantages) -> list[float]:
    by_row = zip(found.values_RT, inputs.trainable_RT, found.excluded_R, strict=True)
    return [float(value) for values, mask, cause in by_row if cause is None for value in values[mask]]


@pytest.mark.parametrize("name", ALL)
def test_what_does_not_count_changes_nothing_of_what_does(name: str) -> None:
    """An unscored member, one wholly beyond the bound, and a group of these beside it."""
    rows = group_of_three()
    beside = [
        turns_row(3, None, "unscored", 0.0, 0.0),
        turns_row(4, 50.0, "stale", 3.0, 0.0),
        turns_row(5, None, "far-unscored", 0.0, group="maze-1"),
        turns_row(6, -70.0, "far-stale", 0.0, group="maze-1"),
    ]
    alone, together = inputs_of(rows), inputs_of([*rows, *beside], stale=(4, 6))
    expected, found = estimate(alone, name), estimate(together, name)
    assert trained_values(together, found) == pytest.approx(trained_values(alone, expected), abs=1e-6)
    assert found.num_unscored == 2 and found.num_groups["maze"] == 1


def prepared(rows: Sequence[TrainingRow], name: str, max_staleness: int | None = None) -> PreparedRows:
    """At version 5, with a ``staleness_mask`` of 2."""
    mask = CorrectionConfig(name="staleness_mask", max_staleness=2)
    training = TrainingConfig(
        advantage=AdvantageConfig(**ALL[name]),
        corrections=(mask,),
        critic=CriticConfig() if name == "gae" else None,
    )
    values = [np.zeros(len(row.token_ids), np.float32) for row in rows] if name == "gae" else None
    return prepare_rows(rows, 5, max_staleness, "train", Algorithms(training), values_RT=values)


def at_version(row: TrainingRow, version: int) -> TrainingRow:
    return replace(row, token_versions=np.where(row.loss_mask, version, row.token_versions))


@pytest.mark.parametrize("name", ALL)
def test_a_member_that_a_staleness_mask_takes_out_whole_leaves_every_statistic(name: str) -> None:
    fresh = [at_version(row, 4) for row in group_of_three()]
    stale = [at_version(turns_row(4, 50.0, "stale", 3.0, 0.0), 2)]
    together, alone = prepared([*fresh, *stale], name), prepared(fresh, name)
    for values, mask, expected in zip(
        together.advantages.values_RT, together.masks.trained_RT, alone.advantages.values_RT, strict=False
    ):
        assert values[mask].tolist() == pytest.approx(expected[mask].tolist(), abs=1e-6)
    assert together.masks.masked_tokens == {"stale": 4} and not together.masks.trained_RT[3].any()


def test_a_member_that_a_staleness_mask_takes_out_in_part_stays_whole_in_baseline_and_denominators() -> None:
    fresh = [at_version(row, 4) for row in group_of_three()]
    part = at_version(turns_row(4, 1.0, "part", 0.0, 0.0), 4)
    part.token_versions[1:3] = 1
    found = prepared([*fresh, part], "grpo, none")
    assert [float(values[1]) for values in found.advantages.values_RT] == pytest.approx([0.4, -0.6, -0.2, 0.4])
    assert found.masks.masked_tokens == {} and int(found.masks.trained_RT[3].sum()) == 4
    bounded = prepared([*fresh, part], "grpo, none", max_staleness=3)
    assert bounded.masks.masked_tokens == {"stale": 2}, "the run's bound leaves its own mark"


@pytest.mark.parametrize("name", ["grpo", "grpo, batch", "grpo, none", "rloo", "gdpo", "turn_returns", "gigpo"])
def test_a_rollout_counts_while_any_of_its_rows_does(name: str) -> None:
    """Whichever row is beyond the bound, the reward stays in the statistics, once."""
    rows = [turns_row(0, 1.0, "a", 0.0, 0.2), turns_row(10, 1.0, "a", 0.0), *group_of_three()[1:]]
    by_stale = [estimate(inputs_of(rows, stale), name) for stale in ((), (0,), (1,))]
    for found in by_stale:
        assert found.num_rollouts == 3 and found.excluded_R == [None] * 4
        assert [values.tolist() for values in found.values_RT] == [values.tolist() for values in by_stale[0].values_RT]


def penalised(rows: Sequence[TrainingRow], per_token: Sequence[Sequence[float]]) -> AdvantageInputs:
    penalties = []
    for row, values in zip(rows, per_token, strict=True):
        penalty = np.zeros(len(row.token_ids), np.float32)
        penalty[row.loss_mask] = values
        penalties.append(penalty)
    return replace(AdvantageInputs.of(rows), penalty_RT=penalties)


TWO_ROWS = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6], [0.0, 0.0], [0.0] * 6]
"""Of a rollout of two rows, with two turns and one, and of two others: in all 2.1, by turn 0.3, 0.7 and 1.1."""


def two_rows() -> list[TrainingRow]:
    return [turns_row(0, 1.0, "a", 0.0, 0.2), turns_row(10, 1.0, "a", 0.0), *group_of_three()[1:]]


@pytest.mark.parametrize("name", ["grpo, none", "rloo"])
def test_a_whole_rollout_pays_the_penalties_of_all_its_rows(name: str) -> None:
    rows = two_rows()
    inputs = penalised(rows, TWO_ROWS)
    net = [-1.1, 0.0, 0.4]
    baselines = {"grpo, none": np.mean(net), "rloo": np.mean(net[1:])}
    found = estimate(inputs, name)
    assert [float(found.values_RT[row][1]) for row in (0, 1)] == pytest.approx([-1.1 - baselines[name]] * 2, abs=1e-6)


def test_a_token_pays_for_itself_and_those_behind_it_also_in_later_rows() -> None:
    """Returns to go of the first rollout: 1 less 2.1, 2.0, 1.8, 1.5, 1.1, 0.6."""
    rows = two_rows()
    inputs = penalised(rows, TWO_ROWS)
    to_go = [-1.1, -1.0, -0.8, -0.5, -0.1, 0.4]
    every = np.array([*to_go, *[0.0] * 2, *[0.4] * 6])
    found = estimate(inputs, "reinforce_plus_plus")
    values = np.concatenate([found.values_RT[row][rows[row].loss_mask] for row in (0, 1)])
    assert values.tolist() == pytest.approx(((every - every.mean()) / every.std())[:6].tolist(), abs=1e-5)


def test_a_turn_pays_for_its_own_tokens_and_its_reward_lies_in_its_own_row() -> None:
    """Rewards by turn 0 - 0.3, 0.2 - 0.7, and the rest 0.8 - 1.1 in the second row; the others 0; 0.1, 0, 0.3."""
    inputs = penalised(two_rows(), TWO_ROWS)
    rewards = [[-0.3, -0.5, -0.3], [0.0], [0.1, 0.0, 0.3]]
    returns = [[sum(0.9**k * value for k, value in enumerate(each[t:])) for t in range(len(each))] for each in rewards]
    mean = np.mean([np.mean(each) for each in returns])
    deviation = np.sqrt(np.mean([np.mean((np.array(each) - mean) ** 2) for each in returns]))
    expected = [(value - mean) / (deviation + 1e-4) for value in returns[0]]
    found = estimate(inputs, "turn_returns")
    assert [float(found.values_RT[row][t]) for row, t in ((0, 1), (0, 4), (1, 1))] == pytest.approx(expected, rel=1e-5)


def test_gae_takes_a_penalty_at_its_token_and_a_reward_at_the_end_of_its_turn() -> None:
    """Values 0 and lambda 1: discounted returns over the tokens of both rows."""
    rows = [turns_row(0, 1.0, "a", 0.0, 0.2), turns_row(10, 1.0, "a", 0.3, 0.0), *group_of_three()[1:]]
    inputs = penalised(rows, [TWO_ROWS[0], [0.5, 0.6, 0.0, 0.0], *TWO_ROWS[2:]])
    inputs = replace(inputs, values_RT=[np.zeros(len(row.token_ids), np.float32) for row in inputs.rows])
    rewards = [-0.1, -0.2, -0.3, 0.2 - 0.4, -0.5, 0.3 - 0.6, 0.0, 0.5]
    expected = [sum(0.9**k * value for k, value in enumerate(rewards[t:])) for t in range(8)]
    section = AdvantageConfig(estimator="gae", discount=0.9, gae_lambda=1.0)
    found = Algorithms(TrainingConfig(advantage=section, critic=CriticConfig())).estimate(inputs)
    values = np.concatenate([found.values_RT[row][inputs.rows[row].loss_mask] for row in (0, 1)])
    assert values.tolist() == pytest.approx(expected, rel=1e-5)
    assert found.returns_RT is not None and found.returns_RT[0] is not None
    assert found.returns_RT[0][inputs.rows[0].loss_mask].tolist() == pytest.approx(expected[:4], rel=1e-5)


@pytest.mark.parametrize("name", ["gigpo", "turn_returns"])
def test_one_member_that_counts_is_compared_with_nobody_by_turn_either(name: str) -> None:
    """Though the turns of a single rollout met one observation, and their returns differ."""
    inputs = inputs_of([turns_row(0, 1.0, "a", 0.0, 0.5), turns_row(1, 3.0, "b", 1.0, 2.0)], stale=(1,))
    assert estimate(inputs, name).excluded_R == ["dead_group", "dead_group"]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"estimator": "gigpo", "step_weight": 2.0}, [1 / 3, -2 / 3, 1 / 3]),
        ({"estimator": "turn_returns"}, [0.125, -0.375, 0.125]),
    ],
)
def test_sooner_is_better_than_later_with_a_discount_and_undivided_as_asked(
    section: dict[str, Any], expected: list[float]
) -> None:
    """Both succeed, one in one turn, the other in two, and all turns read the same: returns 1; 0.5 and 1."""
    rows = [turns_row(0, 1.0, "a", 0.0), turns_row(1, 1.0, "b", 0.0, 0.0)]
    config = AdvantageConfig(scaling="none", discount=0.5, **section)
    found = Algorithms(TrainingConfig(advantage=config)).estimate(AdvantageInputs.of(rows))
    assert found.excluded_R == [None, None]
    turns = [float(found.values_RT[row][t]) for row, t in ((0, 1), (1, 1), (1, 4))]
    assert turns == pytest.approx(expected, abs=1e-6)
