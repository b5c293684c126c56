"""Algorithms by family, task advantage normalisation, plug-ins, and what bad input comes to. M22."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from resources.object_store import ObjectStore
from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.advantages.groups import assemble, group_rows, spread
from tasks.training.advantages.whitening import whiten
from tasks.training.algorithm_config import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    FamilyTrainingConfig,
    KLConfig,
)
from tasks.training.algorithms import Algorithms
from tasks.training.config import LossConfig, OptimizerConfig, TrainingConfig
from tasks.training.corrections.base import CorrectionInputs
from tasks.training.learner import Learner
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.losses.reference_kl import reference_kl
from tasks.training.plugins import ESTIMATORS, LOSSES
from tasks.training.requirements import check_requirements
from tasks.training.row import TrainingRow, TurnSpan
from tests.unit.test_tasks_training_learner import make_batch, make_learner, weights
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import make_row


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


def with_turns(row: TrainingRow) -> TrainingRow:
    """One turn over all that was sampled, and two reward components."""
    sampled = row.loss_mask.nonzero()[0]
    first, end = (int(sampled[0]), int(sampled[-1]) + 1) if sampled.size else (1, 1)
    components = {"outcome": row.reward or 0.0, "format": -0.1 * (len(row.token_ids) % 2)}
    return replace(row, turns=(TurnSpan(0, first, end),), reward_components=components)


# -- whitening and task advantage normalisation ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "expected"), [([], [5.0, 1.0, 3.0]), ([1], [5.0, 1.0, 3.0]), ([1, 2], [5.0, -1.0, 1.0])]
)
def test_m22_whitening_over_0_1_and_2_tokens(chosen: list[int], expected: list[float]) -> None:
    """M22: nothing to divide by for 0 and 1: unchanged; right for 2. What is not chosen is never touched."""
    mask = np.isin(np.arange(3), chosen)
    (values,) = whiten([np.array([5.0, 1.0, 3.0], np.float32)], [mask])
    assert values.tolist() == expected


def test_m22_equal_values_become_zero_and_rounding_is_not_divided() -> None:
    values = np.array([0.3, 0.1 + 0.2, np.float32(0.3)], np.float32)
    assert whiten([values], [np.ones(3, np.bool_)])[0].tolist() == [0.0, 0.0, 0.0]


def scaled_rows(scales: dict[str, float]) -> list[TrainingRow]:
    rows = []
    for number, (family, scale) in enumerate(scales.items()):
        for group in range(2):
            for member in range(4):
                index = 100 * number + 4 * group + member
                reward = scale * (0.3 * member + 0.5 * group * (member % 2))
                row = make_row(index, length=14, trained=tuple(range(4, 6 + member)), reward=reward, family=family)
                rows.append(replace(row, group_id=f"{family}-{group}", rollout_id=f"{family}-{index}"))
    return rows


def test_task_advantage_normalisation_is_mean_0_and_deviation_1_by_family_whatever_the_scale() -> None:
    """AgentRL: over the token-level advantages of the family; unscored and masked tokens are in no statistic."""
    algorithms = Algorithms(TrainingConfig(advantage=AdvantageConfig(scaling="none", normalisation="family")))
    found = {}
    for factor in (1.0, 1000.0):
        rows = scaled_rows({"maze": 0.1 * factor, "sums": 10.0 * factor})
        rows[3] = replace(rows[3], reward=None)
        inputs = AdvantageInputs.of(rows)
        inputs.trainable_RT[0][:] = False
        result = algorithms.estimate(inputs)
        for family in ("maze", "sums"):
            tokens = np.concatenate(
                [
                    values[mask]
                    for row, values, mask in zip(rows, result.values_RT, inputs.trainable_RT, strict=True)
                    if row.family == family and row.reward is not None
                ]
            ).astype(np.float64)
            assert abs(tokens.mean()) < 1e-6 and tokens.std() == pytest.approx(1.0, abs=1e-6)
        found[factor] = np.concatenate([v[m] for v, m in zip(result.values_RT, inputs.trainable_RT, strict=True)])
    assert found[1000.0].tolist() == pytest.approx(found[1.0].tolist(), rel=1e-4, abs=1e-5)


def gradient_norms(directory: Path, rows: list[TrainingRow], normalisation: str) -> dict[str, float]:
    norms = {}
    for family in ("maze", "sums", "code"):
        learner = Learner(
            directory,
            TrainingConfig(
                advantage=AdvantageConfig.model_validate({"scaling": "none", "normalisation": normalisation}),
                loss=LossConfig(name="policy_gradient"),
                optimizer=OptimizerConfig(max_grad_norm=1e9),
                minibatches=1,
            ),
            seed=0,
        )
        of_family = [row for row in rows if row.family == family]
        norms[family] = learner.update(of_family, 0, num_families=3).metrics["grad_norm"]
    return norms


def test_reward_scales_stop_mattering_between_families(directory: Path) -> None:
    """Rewards x0.1, x1, x10: gradient norms of the families 100 apart without, near 1 with, normalisation by family."""
    rows = scaled_rows({"maze": 0.1, "sums": 1.0, "code": 10.0})
    plain, normalised = (gradient_norms(directory, rows, each) for each in ("none", "family"))
    assert max(plain.values()) / min(plain.values()) > 30
    assert max(normalised.values()) / min(normalised.values()) < 2


# -- by family ---------------------------------------------------------------------------------------------------------


def test_a_familys_own_algorithm_is_used_for_its_rows_alone() -> None:
    config = TrainingConfig(
        families={"sums": FamilyTrainingConfig(advantage=AdvantageConfig(estimator="rloo"))},
    )
    rows = [
        *(make_row(i, reward=float(i % 2), family="maze", group="maze-0") for i in range(4)),
        *(make_row(i, reward=float(i % 2), family="sums", group="sums-0") for i in range(4)),
    ]
    result = Algorithms(config).estimate(AdvantageInputs.of(rows))
    assert [float(values[5]) for values in result.values_RT] == pytest.approx(
        [*[-1.0, 1.0] * 2, *[-2 / 3, 2 / 3] * 2], rel=1e-3
    )
    assert result.num_groups == {"maze": 1, "sums": 1}


def test_families_that_share_a_configuration_share_their_statistics() -> None:
    same = AdvantageConfig(scaling="batch")
    config = TrainingConfig(advantage=same, families={"sums": FamilyTrainingConfig(advantage=same, weight=2.0)})
    algorithms = Algorithms(config)
    assert algorithms.of("sums") is algorithms.of("maze") and len(algorithms.all) == 1


def test_a_familys_loss_and_weight_reach_the_gradient(directory: Path) -> None:
    """Only the other family is changed by another loss; twice the weight is twice the loss."""
    losses = {}
    for name, family in {
        "as the run": FamilyTrainingConfig(),
        "double": FamilyTrainingConfig(weight=2.0),
        "kimi": FamilyTrainingConfig(loss=LossConfig(name="kimi")),
    }.items():
        learner = make_learner(directory, minibatches=1, families={"sums": family}, loss=LossConfig(name="tis"))
        metrics = learner.update(make_batch(0), 0).metrics
        losses[name] = metrics["loss"]
        assert ("quadratic_penalty" in metrics) == (name == "kimi")
    only_maze = [row for row in make_batch(0) if row.family == "maze"]
    maze = make_learner(directory, minibatches=1, loss=LossConfig(name="tis")).update(only_maze, 0, num_families=2)
    assert losses["double"] - maze.metrics["loss"] == pytest.approx(
        2 * (losses["as the run"] - maze.metrics["loss"]), rel=1e-4
    )
    assert losses["kimi"] != losses["as the run"]


# -- who is in no statistic --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "gae"])
def test_unscored_and_wholly_stale_members_are_in_no_statistic(estimator: str) -> None:
    """The others get what they would get without them."""
    rows = [with_turns(make_row(i, reward=float(i % 3), length=10 + i)) for i in range(5)]
    beside = [with_turns(make_row(5, reward=None)), with_turns(make_row(6, reward=50.0))]
    algorithms = Algorithms(TrainingConfig(advantage=AdvantageConfig(estimator=estimator)))
    alone = algorithms.estimate(AdvantageInputs.of(rows))
    inputs = AdvantageInputs.of([*rows, *beside])
    inputs.trainable_RT[6][:] = False
    inputs.counted_R[6] = False
    together = algorithms.estimate(inputs)
    for own, other in zip(alone.values_RT, together.values_RT, strict=False):
        assert own.tolist() == pytest.approx(other.tolist(), abs=1e-6)
    assert together.excluded_R[5] == "unscored" and together.num_unscored == 1
    assert not together.values_RT[5].any()


def test_a_member_beyond_the_staleness_bound_leaves_the_baseline(directory: Path) -> None:
    """A row with one token within the bound stays in it."""
    for kept, reward_counts in ((0, False), (1, True)):
        rows = [*(make_row(i, reward=float(i), version=4) for i in range(2)), make_row(9, reward=8.0, version=0)]
        rows[2].token_versions[5 : 5 + kept] = 4
        learner = make_learner(directory, advantage=AdvantageConfig(scaling="none"), minibatches=1)
        learner.version = 4
        metrics = learner.update(rows, 4, max_staleness=2).metrics
        assert metrics["tokens/masked/stale"] == 3 - kept
        assert metrics["advantage/max_abs"] == pytest.approx(5.0 if reward_counts else 0.5)


# -- plug-ins ----------------------------------------------------------------------------------------------------------


class SignEstimator:
    """Advantage +1 or -1 by the sign of the reward; reads an argument."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.size = config.arguments["size"]

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        groups = group_rows(inputs)
        signs = {
            name: math.copysign(self.size, reward)
            for group in groups
            for name, reward in group.rewards.items()
            if reward is not None
        }
        return assemble(inputs, groups, spread(inputs, groups, signs), dropped=frozenset())


class LikelihoodLoss:
    """-A log p, nothing else."""

    needs_proximal = False

    def __init__(self, config: LossConfig) -> None:
        del config

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        values_N = -inputs.advantages_N * inputs.current_logprobs_N
        ones_N = torch.ones_like(inputs.advantages_N)
        return TokenLosses(values_N, ones_N, ones_N < 0)


class HalfWeight:
    """Every token at half its weight."""

    needs_proximal = False

    def __init__(self, config: CorrectionConfig) -> None:
        self.weight = config.arguments["weight"]

    def weights(self, inputs: CorrectionInputs) -> torch.Tensor:
        return torch.full_like(inputs.staleness_N, self.weight, dtype=torch.float32)


def test_estimator_loss_and_correction_of_ones_own_plug_in_by_import_path(directory: Path) -> None:
    own = {
        "advantage": AdvantageConfig(estimator=f"{__name__}:SignEstimator", arguments={"size": 2.0}),
        "loss": LossConfig(name=f"{__name__}:LikelihoodLoss"),
    }
    half = (CorrectionConfig(name=f"{__name__}:HalfWeight", arguments={"weight": 0.5}),)
    whole = make_learner(directory, minibatches=1, **own).update(make_batch(0), 0).metrics
    halved = make_learner(directory, minibatches=1, corrections=half, **own).update(make_batch(0), 0).metrics
    assert whole["advantage/max_abs"] == 2.0 and whole["loss"] != 0.0
    assert halved["loss"] == pytest.approx(whole["loss"] / 2, rel=1e-5)
    assert halved["correction/weight"] == 0.5


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_algorithm_survives_a_poor_batch(directory: Path, estimator: str, loss: str) -> None:
    """One member; one group of equal rewards; nothing scored; no trained token: a step or a counted, explained skip."""
    learner = make_learner(
        directory,
        advantage=AdvantageConfig(estimator=estimator),
        loss=LossConfig(name=loss),
        critic=CriticConfig() if estimator == "gae" else None,
        minibatches=1,
    )
    batches = [
        [make_row(0, reward=1.0)],
        [make_row(i, reward=0.5) for i in range(3)],
        [make_row(i, reward=None) for i in range(3)],
        [make_row(i, reward=float(i), trained=()) for i in range(3)],
        [],
    ]
    for version, rows in enumerate(batches):
        report = learner.update([with_turns(row) for row in rows], version)
        json.dumps(report.metrics, allow_nan=False)
        assert (report.optimizer_steps == 0) == (report.skipped is not None)
        assert report.optimizer_steps == 0 or estimator in ("gae", "reinforce_plus_plus")
    assert torch.isfinite(weights(learner)).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused_before_anything_changes(directory: Path, value: float) -> None:
    learner = make_learner(directory)
    before = weights(learner)
    good = with_turns(make_row(0))
    for bad, message in (
        (replace(good, reward=value), "reward is"),
        (replace(good, reward_components={"outcome": value}), "reward component 'outcome' is"),
        (replace(good, turns=(TurnSpan(0, 5, 8, value),)), "reward of turn 0 is"),
    ):
        with pytest.raises(ValueError, match=message):
            learner.update([bad], 0)
    assert torch.equal(weights(learner), before) and learner.version == 0


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ((TurnSpan(0, 5, 7),), "a sampled token lies in no turn"),
        ((TurnSpan(0, 5, 13),), "turns lie in order and do not overlap"),
        ((TurnSpan(0, 5, 7), TurnSpan(6, 7, 8)), "turn 1 spans 6, 7, 8 behind 7"),
    ],
)
def test_turns_that_do_not_fit_the_row_are_refused(turns: tuple[TurnSpan, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_row(0), turns=turns).validate(version=0, vocabulary_size=40)


@pytest.mark.parametrize("estimator", ["gigpo", "turn_returns"])
def test_an_estimator_by_turn_refuses_rows_without_turns(directory: Path, estimator: str) -> None:
    learner = make_learner(directory, advantage=AdvantageConfig(estimator=estimator))
    with pytest.raises(ValueError, match=rf"v0-0/\d+ \(maze\): its turns are not known, and {estimator} works by turn"):
        learner.update(make_batch(0), 0)
    assert learner.version == 0


def test_what_an_algorithm_needs_and_the_run_lacks_is_refused_at_the_start() -> None:
    gae = AdvantageConfig(estimator="gae")
    with pytest.raises(ValidationError, match=r"training\.advantage\.estimator is 'gae', which needs a critic"):
        TrainingConfig(advantage=gae)
    with pytest.raises(ValidationError, match=r"training\.families\.maze\.advantage\.estimator is 'gae'"):
        TrainingConfig(families={"maze": FamilyTrainingConfig(advantage=gae)})
    with pytest.raises(ValidationError, match=r"training\.critic is given, but no estimator reads it"):
        TrainingConfig(critic=CriticConfig())
    with pytest.raises(ValidationError, match=r"training\.fixed_length_tokens is null"):
        TrainingConfig(normaliser="fixed_length")
    with pytest.raises(ValidationError, match=r"low 2\.0 and high 1\.0; low must be below high"):
        CorrectionConfig(name="ratio_mask", low=2.0, high=1.0)


def test_an_algorithm_that_no_family_has_is_neither_asked_for_what_it_needs_nor_built() -> None:
    """The run's own lacks a critic and its plug-in cannot be found; every family does otherwise."""
    own = {"advantage": AdvantageConfig(estimator="gae"), "loss": LossConfig(name="nowhere.to_be_found:Loss")}
    grpo, clip = AdvantageConfig(), LossConfig()
    families = {
        "maze": FamilyTrainingConfig(advantage=grpo, loss=clip),
        "sums": FamilyTrainingConfig(advantage=AdvantageConfig(estimator="rloo"), loss=clip),
    }
    config = TrainingConfig(**own, families=families)
    check_requirements(config, ["maze", "sums"])
    algorithms = Algorithms(config.for_families(["maze", "sums"]))
    assert len(algorithms.all) == 2 and not algorithms.needs_critic
    assert [algorithms.of(name).advantage.estimator for name in ("maze", "sums")] == ["grpo", "rloo"]
    with pytest.raises(ValueError, match=r"training\.advantage\.estimator is 'gae', which needs a critic"):
        check_requirements(config, ["maze", "sums", "code"])
    assert config.for_families(["maze", "sums", "code"]) is config
    with pytest.raises(ValueError, match="nowhere"):
        Algorithms(config)
    TrainingConfig(**own, critic=CriticConfig(), families={"maze": families["maze"]})


@pytest.mark.parametrize(("loss", "remedy"), [("ppo_clip", "ratio_to to 'proximal'"), ("decoupled", "leave the corr")])
def test_the_behaviour_policy_is_divided_by_once(loss: str, remedy: str) -> None:
    weight = (CorrectionConfig(name="truncated_weight"),)
    with pytest.raises(ValidationError, match=f"already weighs by the behaviour policy; .*{remedy}"):
        TrainingConfig(loss=LossConfig(name=loss), corrections=weight)
    TrainingConfig(loss=LossConfig(name="ppo_clip", ratio_to="proximal"), corrections=weight)
    TrainingConfig(loss=LossConfig(name="policy_gradient"), corrections=weight)
    TrainingConfig(corrections=(CorrectionConfig(name="ratio_mask"), CorrectionConfig(name="m2po")))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("difference", [100.0, -100.0])
def test_m6_every_kl_estimate_is_finite(estimator: str, dtype: torch.dtype, difference: float) -> None:
    """M6: a log-probability difference of 100: finite value, finite gradient."""
    policy = torch.tensor([-101.0 if difference > 0 else -1.0], dtype=dtype, requires_grad=True)
    values = reference_kl(
        policy, torch.tensor([-101.0 + difference if difference > 0 else -101.0], dtype=dtype), estimator
    )
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert policy.grad is not None and torch.isfinite(policy.grad).all()


# -- the critic --------------------------------------------------------------------------------------------------------


def critic_learner(directory: Path, **critic) -> Learner:
    return make_learner(
        directory,
        advantage=AdvantageConfig(estimator="gae", gae_lambda=1.0, normalisation="batch"),
        critic=CriticConfig(learning_rate=0.05, value_clip=5.0, **critic),
    )


def test_the_critic_learns_the_return_and_leaves_the_decoder_alone(directory: Path) -> None:
    """Rewards 2 everywhere: values go from 0 to 2; the first advantages equal the reward, whitened away to 0."""
    learner = critic_learner(directory)
    before = weights(learner)
    errors = []
    for version in range(30):
        rows = [replace(row, reward=2.0) for row in make_batch(version)]
        metrics = learner.update(rows, version).metrics
        errors.append(metrics["critic/loss"])
        json.dumps(metrics, allow_nan=False)
        if version == 0:
            assert metrics["critic/return"] == pytest.approx(2.0, abs=1e-5)
            assert metrics["advantage/max_abs"] == 0.0
            assert float((weights(learner) - before).abs().max()) < 1e-3, "weight decay alone"
    assert errors[0] > 1.0 and errors[-1] < 0.1 and metrics["critic/value"] == pytest.approx(2.0, abs=0.3)


def test_the_value_loss_reaches_the_decoder_only_if_asked(directory: Path) -> None:
    for train_decoder in (False, True):
        learner = critic_learner(directory, train_decoder=train_decoder)
        assert learner._critic is not None
        torch.nn.init.ones_(learner._critic.head.weight)
        rows = [replace(row, reward=2.0) for row in make_batch(0)]
        norm = learner.update(rows, 0).metrics["grad_norm"]
        # Values differ between tokens here, so the policy has a gradient too; compare with one without the critic's.
        other = critic_learner(directory, train_decoder=False)
        assert other._critic is not None
        torch.nn.init.ones_(other._critic.head.weight)
        assert (norm == other.update(rows, 0).metrics["grad_norm"]) == (not train_decoder)


def test_a_restored_critic_goes_on_bitwise(directory: Path, tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    original = critic_learner(directory)
    original.update(make_batch(0), 0)
    original.save(store, "c")
    restored = critic_learner(directory)
    restored.restore(store, "c")
    for version in (1, 2):
        first, second = (each.update(make_batch(version), version).metrics for each in (original, restored))
        assert torch.equal(weights(original), weights(restored))
        assert first["critic/loss"] == second["critic/loss"] and first["critic/value"] == second["critic/value"]


def test_a_checkpoint_without_a_critic_is_refused_and_changes_nothing(directory: Path, tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    plain = make_learner(directory)
    plain.update(make_batch(0), 0)
    plain.save(store, "c")
    learner = critic_learner(directory)
    before = weights(learner)
    with pytest.raises(ValueError, match="was written without a critic"):
        learner.restore(store, "c")
    with pytest.raises(KeyError):
        learner.restore(store, "absent")
    assert torch.equal(weights(learner), before) and learner.version == 0


def test_a_family_without_a_critic_beside_one_with(directory: Path) -> None:
    gae = FamilyTrainingConfig(advantage=AdvantageConfig(estimator="gae"))
    learner = make_learner(directory, families={"sums": gae}, critic=CriticConfig(), minibatches=1)
    metrics = learner.update(make_batch(0), 0).metrics
    of_sums = [row for row in make_batch(0) if row.family == "sums"]
    returns = [row.reward for row in of_sums if row.reward is not None]
    assert metrics["critic/return"] == pytest.approx(np.mean(returns), rel=0.1)


def test_kl_is_off_unless_asked_for() -> None:
    assert not any(each.needs_reference for each in Algorithms(TrainingConfig()).all)
    assert all(each.needs_reference for each in Algorithms(TrainingConfig(kl=KLConfig(coefficient=0.1))).all)


def with_penalties() -> AdvantageInputs:
    """Reward 1 with 0.1, 0.2 and 0.3 taken at its three tokens; a sibling of reward 0 without any."""
    rows = [make_row(0, reward=1.0), make_row(1, reward=0.0)]
    penalties = [np.zeros(12, np.float32) for _ in rows]
    penalties[0][5:8] = [0.1, 0.2, 0.3]
    return replace(AdvantageInputs.of(rows), penalty_RT=penalties, values_RT=[np.zeros(12, np.float32) for _ in rows])


def test_a_penalty_is_paid_by_its_token_and_those_before_it() -> None:
    """Returns to go 0.4, 0.5, 0.7 by token; whole rollouts are compared at 0.4."""
    inputs = with_penalties()
    to_go = [0.4, 0.5, 0.7]
    gae = AdvantageConfig(estimator="gae", gae_lambda=1.0)
    by_gae = Algorithms(TrainingConfig(advantage=gae, critic=CriticConfig())).estimate(inputs)
    assert by_gae.values_RT[0][5:8].tolist() == pytest.approx(to_go, abs=1e-6)
    plus_plus = AdvantageConfig(estimator="reinforce_plus_plus")
    whitened = Algorithms(TrainingConfig(advantage=plus_plus)).estimate(inputs)
    every = np.array([*to_go, 0.0, 0.0, 0.0])
    expected = (every - every.mean()) / every.std()
    assert whitened.values_RT[0][5:8].tolist() == pytest.approx(expected[:3].tolist(), abs=1e-5)
    by_rollout = Algorithms(TrainingConfig(advantage=AdvantageConfig(estimator="rloo"))).estimate(inputs)
    assert float(by_rollout.values_RT[0][5]) == pytest.approx(0.4, abs=1e-6)
    with pytest.raises(ValueError, match=r"training\.kl\.place is 'reward', which gdpo cannot use"):
        Algorithms(TrainingConfig(advantage=AdvantageConfig(estimator="gdpo"))).estimate(inputs)
