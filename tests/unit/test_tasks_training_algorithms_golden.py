"""Every estimator, loss, correction, KL estimate and denominator against tests/golden/algorithms.json (float64)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.training.advantages.base import AdvantageInputs
from tasks.training.algorithm_config import AdvantageConfig, CorrectionConfig, CriticConfig, FamilyTrainingConfig
from tasks.training.algorithms import Algorithms
from tasks.training.config import LossConfig, TrainingConfig
from tasks.training.corrections.base import CorrectionInputs
from tasks.training.critic import Critic
from tasks.training.losses.base import LossInputs
from tasks.training.losses.reference_kl import reference_kl
from tasks.training.normalisers import build_normaliser
from tasks.training.plugins import CORRECTIONS, ESTIMATORS, LOSSES, NORMALISERS, resolve
from tasks.training.row import TrainingRow, TurnSpan
from tests.unit.test_tasks_training_row import make_row

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "algorithms.json").read_text())


def algorithms_of(**advantage) -> Algorithms:
    critic = CriticConfig() if advantage["estimator"] == "gae" else None
    return Algorithms(TrainingConfig(advantage=AdvantageConfig(**advantage), critic=critic))


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=lambda case: case["loss"])
def test_losses_and_their_gradients(case: dict) -> None:
    config = LossConfig(**case["config"])
    loss = resolve("training.loss.name", config.name, LOSSES)(config)
    current = torch.tensor(case["current"], requires_grad=True)
    losses = loss.token_losses(
        LossInputs(
            current_logprobs_N=current,
            behaviour_logprobs_N=torch.tensor(case["behaviour"]),
            proximal_logprobs_N=torch.tensor(case["proximal"]) if loss.needs_proximal else None,
            advantages_N=torch.tensor(case["advantages"]),
            sequence_N=torch.tensor(case["sequence"]),
            num_sequences=4,
            rewards_N=torch.tensor(case["rewards"]),
            staleness_N=torch.tensor(case["staleness"]),
        )
    )
    assert losses.values_N.tolist() == pytest.approx(case["values"], rel=2e-5, abs=1e-6)
    (gradient,) = torch.autograd.grad(losses.values_N.sum(), current)
    assert gradient.tolist() == pytest.approx(case["gradients"], rel=1e-4, abs=1e-5)
    assert not losses.ratio_N.requires_grad and losses.clipped_N.dtype == torch.bool


@pytest.mark.parametrize("case", GOLDEN["kl"], ids=lambda case: case["estimator"])
def test_kl_estimates_and_their_gradients(case: dict) -> None:
    current = torch.tensor(case["current"], requires_grad=True)
    values = reference_kl(current, torch.tensor(case["reference"]), case["estimator"])
    (gradient,) = torch.autograd.grad(values.sum(), current)
    assert values.tolist() == pytest.approx(case["values"], rel=2e-5, abs=1e-6)
    assert gradient.tolist() == pytest.approx(case["gradients"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("case", GOLDEN["corrections"], ids=lambda case: case["config"]["name"])
def test_corrections(case: dict) -> None:
    config = CorrectionConfig(**case["config"])
    correction = resolve("training.corrections.name", config.name, CORRECTIONS)(config)
    weights = correction.weights(
        CorrectionInputs(
            torch.tensor(case["log_ratio"]), torch.tensor(case["staleness"]), torch.tensor(case["sequence"]), 4
        )
    )
    assert weights.tolist() == pytest.approx(case["weights"], rel=1e-5)


def rows_of_groups() -> list[TrainingRow]:
    return [
        make_row(
            member,
            trained=tuple(range(4, 4 + GOLDEN["tokens"][number][member])),
            reward=reward,
            group=f"maze-{number}",
        )
        for number, group in enumerate(GOLDEN["groups"])
        for member, reward in enumerate(group)
    ]


@pytest.mark.parametrize("case", GOLDEN["rollouts"], ids=lambda case: "-".join(map(str, case["config"].values())))
def test_estimators_of_whole_rollouts(case: dict) -> None:
    rows = rows_of_groups()
    result = algorithms_of(**case["config"]).estimate(AdvantageInputs.of(rows))
    expected = [value for group in case["advantages"] for value in group]
    for row, values, cause, value in zip(rows, result.values_RT, result.excluded_R, expected, strict=True):
        assert (cause is not None) == (value is None), row.trajectory_id
        assert values[row.loss_mask].tolist() == pytest.approx([value or 0.0] * int(row.loss_mask.sum()), abs=2e-6)


def test_gdpo() -> None:
    case = GOLDEN["gdpo"]
    rows = [
        replace(
            make_row(member, reward=0.0, group=f"maze-{group}"),
            reward_components={name: values[group][member] for name, values in case["components"].items()},
        )
        for group in range(3)
        for member in range(4)
    ]
    result = algorithms_of(estimator="gdpo", component_weights=case["weights"]).estimate(AdvantageInputs.of(rows))
    expected = [value for group in case["advantages"] for value in group]
    assert [values[5] for values in result.values_RT] == pytest.approx([v or 0.0 for v in expected], abs=2e-6)
    assert [cause for cause in result.excluded_R] == [None] * 8 + ["dead_group"] * 4


def episode_rows() -> list[TrainingRow]:
    """Turns of one observation token, which is the state, and two sampled ones."""
    states = {"s": 1, "a": 2, "b": 3, "c": 4}
    rows = []
    for number, episode in enumerate(GOLDEN["episodes"]):
        length = 3 * len(episode["states"])
        row = make_row(
            number,
            length=length,
            trained=tuple(t for t in range(length) if t % 3),
            reward=episode["final"],
            group="maze-0",
        )
        row.token_ids[::3] = [states[state] for state in episode["states"]]
        turns = tuple(TurnSpan(3 * t, 3 * t + 1, 3 * t + 3, reward) for t, reward in enumerate(episode["inline"]))
        rows.append(replace(row, turns=turns))
    return rows


def assert_by_turn(config: dict, advantages: list[list[float]]) -> None:
    rows = episode_rows()
    for row in rows:
        row.validate(version=0, vocabulary_size=40)
    result = algorithms_of(**config).estimate(AdvantageInputs.of(rows))
    for values, expected in zip(result.values_RT, advantages, strict=True):
        assert values[1::3].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert values[2::3].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", GOLDEN["turn_returns"])
def test_turn_returns(case: dict) -> None:
    assert_by_turn({"estimator": "turn_returns", "discount": case["discount"]}, case["advantages"])


@pytest.mark.parametrize("case", GOLDEN["gigpo"])
def test_gigpo(case: dict) -> None:
    config = {"estimator": "gigpo", "discount": case["discount"], "step_weight": case["step_weight"]}
    assert_by_turn(config, case["advantages"])


@pytest.mark.parametrize("case", GOLDEN["gae"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_gae(case: dict, num_rows: int) -> None:
    """Also with the rollout cut into two rows: the value behind the first is that before the second."""
    per_row = [case["turns"]] if num_rows == 1 else [case["turns"][:2], case["turns"][2:]]
    inline, values = iter(case["inline"]), iter(case["values"])
    rows, values_RT = [], []
    for number, turns in enumerate(per_row):
        length = sum(turns) + len(turns)
        mask = np.ones(length, np.bool_)
        spans, start = [], 0
        for size in turns:
            mask[start] = False
            spans.append(TurnSpan(start, start + 1, start + 1 + size, next(inline)))
            start += 1 + size
        row = make_row(
            number, length=length, trained=tuple(mask.nonzero()[0]), reward=case["final"], group="maze-0", rollout="one"
        )
        rows.append(replace(row, turns=tuple(spans)))
        read = np.zeros(length, np.float32)
        read[mask] = [next(values) for _ in range(int(mask.sum()))]
        values_RT.append(read)
    config = {"estimator": "gae", "discount": case["discount"], "gae_lambda": case["gae_lambda"]}
    result = algorithms_of(**config).estimate(replace(AdvantageInputs.of(rows), values_RT=values_RT))
    found = np.concatenate([v[row.loss_mask] for v, row in zip(result.values_RT, rows, strict=True)])
    assert result.returns_RT is not None
    returns = np.concatenate(
        [v[row.loss_mask] for v, row in zip(result.returns_RT, rows, strict=True) if v is not None]
    )
    assert found.tolist() == pytest.approx(case["advantages"], rel=1e-5, abs=1e-6)
    assert returns.tolist() == pytest.approx(case["returns"], rel=1e-5, abs=1e-6)


def test_the_critics_loss_and_its_gradient() -> None:
    case = GOLDEN["value_loss"]
    values = torch.tensor(case["values"], requires_grad=True)
    losses, clipped = Critic(4, CriticConfig(value_clip=0.2), "cpu").losses(
        values, torch.tensor(case["start"]), torch.tensor(case["returns"])
    )
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert losses.tolist() == pytest.approx(case["losses"], rel=1e-5, abs=1e-6)
    assert gradient.tolist() == pytest.approx(case["gradients"], rel=1e-4, abs=1e-5)
    assert clipped.any() and not clipped.all()
    beside_the_policy = CriticConfig(value_clip=0.2, train_decoder=True, coefficient=0.25)
    weighed, _ = Critic(4, beside_the_policy, "cpu").losses(
        values, torch.tensor(case["start"]), torch.tensor(case["returns"])
    )
    assert weighed.tolist() == pytest.approx((0.25 * losses).tolist(), rel=1e-6)


@pytest.mark.parametrize("name", NORMALISERS)
def test_denominators(name: str) -> None:
    case = GOLDEN["normalisers"]
    tokens = np.array(case["tokens"])
    config = TrainingConfig(normaliser=name, fixed_length_tokens=32 if name == "fixed_length" else None)
    assert build_normaliser(config)(tokens, case["families"], 3).tolist() == pytest.approx(case[name])
    weighted = TrainingConfig(
        normaliser=name,
        fixed_length_tokens=config.fixed_length_tokens,
        families={"sums": FamilyTrainingConfig(weight=3.0)},
    )
    expected = np.array(case[name]) * [1.0, 1.0, 3.0, 1.0]
    assert build_normaliser(weighted)(tokens, case["families"], 3).tolist() == pytest.approx(expected.tolist())


def test_everything_built_in_is_here() -> None:
    tested = {case["config"]["name"] for case in GOLDEN["losses"]}
    assert tested == set(LOSSES)
    assert {case["config"]["name"] for case in GOLDEN["corrections"]} == set(CORRECTIONS)
    estimators = {case["config"]["estimator"] for case in GOLDEN["rollouts"]}
    assert estimators | {"gdpo", "turn_returns", "gigpo", "gae"} == set(ESTIMATORS)
    assert set(NORMALISERS) <= set(GOLDEN["normalisers"])
