"""Updates that begin before their batch is whole: the same gradient, the same weights, the same metrics. What cannot be
streamed is refused, and what fails in the middle changes nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tasks.training.advantages.grpo import GRPO
from tasks.training.algorithm_config import (
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    FamilyTrainingConfig,
    KLConfig,
)
from tasks.training.algorithms import Algorithms
from tasks.training.config import LossConfig, OptimizerConfig, TrainingConfig
from tasks.training.corrections.staleness_mask import StalenessMask
from tasks.training.learner import Learner
from tasks.training.model import load_policy
from tasks.training.plugins import CORRECTIONS, ESTIMATORS
from tasks.training.prepared import TrainableRows
from tasks.training.row import TrainingRow, TurnSpan
from tasks.training.steps import NonFiniteUpdate, UpdateSteps
from tasks.training.streamed_steps import StreamedSteps
from tasks.training.streaming import BATCH_CORRECTIONS, BATCH_ESTIMATORS, STREAMED_NORMALISERS
from tests.rank_processes import on_ranks
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import make_row
from tests.unit.test_tasks_training_steps import LOSS_CONFIGS, gradient_of, parts_of, random_rows

# With a large epsilon AdamW's step is proportional to the gradient, so that weights tell gradients apart.
OPTIMIZER = OptimizerConfig(learning_rate=1e-1, warmup_updates=0, adam_epsilon=1.0, weight_decay=0.0)
ONE_STEP: dict[str, Any] = {"optimizer": OPTIMIZER, "minibatches": 1, "max_tokens_per_microbatch": 30}
STREAMED: dict[str, Any] = {**ONE_STEP, "streamed": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory: Path) -> PreTrainedModel:
    return load_policy(directory, "packed", "cpu")


# -- the gradient ------------------------------------------------------------------------------------------------------

STREAMED_CORRECTIONS = sorted(CORRECTIONS.keys() - BATCH_CORRECTIONS.keys())


def chosen(rows: TrainableRows, indices: Sequence[int]) -> TrainableRows:
    return TrainableRows(
        sequences=[rows.sequences[i] for i in indices],
        families=[rows.families[i] for i in indices],
        advantages_RT=[rows.advantages_RT[i] for i in indices],
        behaviour_RT=[rows.behaviour_RT[i] for i in indices],
        versions_RT=[rows.versions_RT[i] for i in indices],
        num_families=1,
        version=rows.version,
        rewards_R=[rows.rewards_R[i] for i in indices] if rows.rewards_R is not None else None,
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 24), min_size=1, max_size=9),
    normaliser=st.sampled_from(STREAMED_NORMALISERS),
    loss=st.sampled_from(LOSS_CONFIGS),
    other_loss=st.sampled_from([None, *LOSS_CONFIGS]),
    correction=st.sampled_from([None, *STREAMED_CORRECTIONS]),
    level=st.sampled_from(["token", "sequence_sum", "sequence_mean"]),
    budget=st.integers(1, 80),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_a_streamed_gradient_is_that_of_the_whole_batch(
    model: PreTrainedModel, lengths, normaliser, loss, other_loss, correction, level, budget, seed, data
) -> None:
    """Every loss, denominator and correction, for rows that arrive in any order and in any parts."""
    level = "token" if correction == "staleness_mask" else level
    corrections = () if correction is None else (CorrectionConfig(name=correction, level=level),)
    if corrections and "weight" in str(correction):
        loss, other_loss = LossConfig(name="policy_gradient"), None
    changes: dict[str, Any] = {
        "normaliser": normaliser,
        "fixed_length_tokens": 16 if normaliser == "fixed_length" else None,
        "loss": loss,
        "corrections": corrections,
        "families": {"sums": FamilyTrainingConfig(loss=other_loss, weight=2.0)},
        "minibatches": 1,
    }
    rows = random_rows(seed, lengths, ["maze" if i % 3 else "sums" for i in range(len(lengths))])
    whole = TrainingConfig(**changes, max_tokens_per_microbatch=10_000)
    streamed = TrainingConfig(**changes, max_tokens_per_microbatch=budget, streamed=True)

    steps = UpdateSteps(rows, parts_of(whole, model))
    corrected = steps.passes.prepare_corrections()
    sums, loss_value, norm = steps.accumulate_gradient(range(len(lengths)), at_start=True)
    gradient, metrics = gradient_of(model), {**sums.read(), **corrected}

    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)))) | {len(lengths)})
    stream = StreamedSteps(parts_of(streamed, model))
    for start, end in zip([0, *cuts], cuts, strict=False):
        stream.add(chosen(rows, order[start:end]))
        assert all(parameter.grad is None for parameter in model.parameters()), "nothing is left in between"
    streamed_loss, streamed_norm = stream.accumulate_gradient(rows.num_families)
    assert float((gradient - gradient_of(model)).abs().max()) <= 1e-6
    assert streamed_loss == pytest.approx(loss_value, rel=1e-5, abs=1e-6)
    assert streamed_norm == pytest.approx(norm, rel=1e-5, abs=1e-6)
    assert stream.passes is not None
    found = {**stream.sums.read(), **stream.passes.prepare_corrections()}
    assert found.keys() == metrics.keys()
    for name, value in metrics.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_a_row_runs_as_soon_as_a_micro_batch_is_full(model: PreTrainedModel) -> None:
    config = TrainingConfig(minibatches=1, streamed=True, normaliser="token_mean", max_tokens_per_microbatch=20)
    stream = StreamedSteps(parts_of(config, model))
    rows = random_rows(0, [12, 12, 6], ["maze", "sums", "maze"])
    ran = []
    for row in range(3):
        stream.add(chosen(rows, [row]))
        ran.append(stream.num_tokens_run)
    assert ran == [0, 24, 24], "12 tokens wait, 24 fill a micro-batch, 6 wait"
    stream.accumulate_gradient(1)
    assert stream.num_tokens_run == 30


# -- the update --------------------------------------------------------------------------------------------------------

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo_unscaled": {"advantage": AdvantageConfig(scaling="none"), "loss": LossConfig(name="gspo")},
    "rloo": {"advantage": AdvantageConfig(estimator="rloo"), "loss": LossConfig(name="decoupled")},
    "turn_returns": {"advantage": AdvantageConfig(estimator="turn_returns", discount=0.9)},
    "gigpo": {"advantage": AdvantageConfig(estimator="gigpo", discount=0.9)},
    "gae": {"advantage": AdvantageConfig(estimator="gae"), "critic": CriticConfig()},
    "gae_with_decoder": {"advantage": AdvantageConfig(estimator="gae"), "critic": CriticConfig(train_decoder=True)},
    "gae_in_one_family": {
        "families": {"sums": FamilyTrainingConfig(advantage=AdvantageConfig(estimator="gae"))},
        "critic": CriticConfig(train_decoder=True),
    },
    "kl_in_loss": {"kl": KLConfig(coefficient=0.1), "normaliser": "sequence_mean"},
    "kl_in_reward": {"kl": KLConfig(coefficient=0.1, place="reward"), "advantage": AdvantageConfig(estimator="rloo")},
    "entropy": {"loss": LossConfig(entropy_coefficient=0.05), "normaliser": "token_mean"},
    "masked": {"truncated_rows": "mask", "normaliser": "fixed_length", "fixed_length_tokens": 9},
    "corrected": {
        "loss": LossConfig(name="ppo_clip", ratio_to="proximal"),
        "corrections": (CorrectionConfig(name="truncated_weight"), CorrectionConfig(name="staleness_mask")),
    },
}


def batch_of(version: int) -> list[TrainingRow]:
    """Two families, three groups of three each: one of equal rewards, one with an unscored member, a cut row, tokens of
    two versions."""
    rows = []
    for group in range(6):
        for member in range(3):
            row = make_row(
                100 * version + 3 * group + member,
                length=10 + 3 * member + group,
                trained=(4, 5, 8),
                reward=1.0 if group == 2 else None if (group, member) == (3, 1) else float(member % 2 + group),
                family="maze" if group % 2 else "sums",
                group=f"v{version}-{group}",
                version=version,
                temperature=0.9,
                truncated=(group, member) == (4, 2),
            )
            row = replace(row, turns=(TurnSpan(0, 4, 6, 0.25), TurnSpan(6, 8, 9, 0.0)))
            if member == 0 and version:
                row.token_versions[4] -= 1
            rows.append(row)
    return rows


def groups_of(rows: Sequence[TrainingRow], order: Sequence[int]) -> list[list[TrainingRow]]:
    names = list(dict.fromkeys(row.group_id for row in rows))
    return [[row for row in rows if row.group_id == names[number]] for number in order]


def stream_all(learner: Learner, version: int, order: Sequence[int], late: int = 1) -> dict[str, Any]:
    """All groups but the last ``late`` ones one by one, then the batch."""
    rows = batch_of(version)
    for group in groups_of(rows, order)[: len(order) - late]:
        learner.stream(group, version, max_staleness=1)
    return learner.update(rows, version, max_staleness=1).metrics


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return learner.tensors()


def assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert float((tensor - found[name]).abs().max()) <= 1e-6, name


def assert_same_metrics(expected: dict[str, Any], found: dict[str, Any]) -> None:
    timed = ("time/", "tokens_per_s", "tokens/streamed", "num_streamed_groups")
    assert {name for name in expected if not name.startswith(timed)} == {
        name for name in found if not name.startswith(timed)
    }
    for name, value in expected.items():
        if not name.startswith(timed):
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def make(directory: Path, **changes: Any) -> Learner:
    return Learner(directory, TrainingConfig(**changes), seed=0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_streamed_update_is_the_whole_batchs(directory: Path, name: str) -> None:
    """Weights, critic, metrics and moments over two updates, for every estimator that can be streamed."""
    whole = make(directory, **ONE_STEP, **ALGORITHMS[name])
    streamed = make(directory, **STREAMED, **ALGORITHMS[name])
    for version, order, late in ((0, (5, 1, 2, 0, 4, 3), 1), (1, (2, 3, 0, 1, 5, 4), 3)):
        expected = whole.update(batch_of(version), version, max_staleness=1).metrics
        found = stream_all(streamed, version, order, late)
        assert found["tokens/streamed"] > 0 and expected["optimizer_steps"] == 1
        assert_same_metrics(expected, found)
        assert_same(weights(whole), weights(streamed))
    if whole._critic is not None and streamed._critic is not None:
        assert_same(whole._critic.tensors(), streamed._critic.tensors())
    assert set(ESTIMATORS) - BATCH_ESTIMATORS.keys() == {"grpo", "rloo", "turn_returns", "gigpo", "gae"}


def test_a_batch_of_nothing_but_dead_groups_is_skipped(directory: Path) -> None:
    learner = make(directory, **STREAMED)
    rows = [make_row(index, reward=1.0, group="dead") for index in range(2)]
    learner.stream(rows, 0)
    report = learner.update(rows, 0)
    assert report.skipped is not None and report.optimizer_steps == 0 and learner.version == 1


def test_weights_move_only_when_the_batch_is_whole(directory: Path) -> None:
    learner = make(directory, **STREAMED)
    before = weights(learner)
    for group in groups_of(batch_of(0), range(6)):
        learner.stream(group, 0, max_staleness=1)
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())
    assert learner.version == 0 and learner.num_streamed_groups == 6
    learner.update(batch_of(0), 0, max_staleness=1)
    assert learner.version == 1 and learner.num_streamed_groups == 0
    with pytest.raises(ValueError, match="holds version 1; batch 0 is not the next one"):
        learner.stream(batch_of(0)[:3], 0)
    with pytest.raises(ValueError, match="holds version 1; batch 0 is not the next one"):
        learner.update(batch_of(0), 0)


@pytest.mark.parametrize("otherwise", ["reward", "left_out", "shorter"])
def test_the_batch_decides_what_is_trained(directory: Path, otherwise: str) -> None:
    """What was streamed and is not in the batch, or otherwise, leaves no trace."""
    rows = batch_of(0)
    if otherwise == "reward":
        batch = [make_row(7, reward=0.5, group=rows[0].group_id, family="sums"), *rows[1:]]
    elif otherwise == "left_out":
        batch = rows[3:]
    else:
        batch = rows[1:]
    whole, streamed = make(directory, **ONE_STEP), make(directory, **STREAMED)
    expected = whole.update(batch, 0, max_staleness=1).metrics
    for group in groups_of(rows, range(4)):
        streamed.stream(group, 0, max_staleness=1)
    found = streamed.update(batch, 0, max_staleness=1).metrics
    assert_same_metrics(expected, found)
    assert_same(weights(whole), weights(streamed))
    assert "tokens/streamed" not in found


class FailsOnce:
    """Stands where a method does, and fails the first time after so many calls."""

    def __init__(self, method: Callable[..., Any], good_calls: int) -> None:
        self.method, self.good_calls = method, good_calls

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.good_calls -= 1
        if self.good_calls == -1:
            raise RuntimeError("the device fell off the bus")
        return self.method(*arguments, **named)


@pytest.mark.parametrize("good_calls", [0, 2])
def test_a_failure_in_the_middle_leaves_the_weights_and_a_retry_trains_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, good_calls: int
) -> None:
    whole, streamed = make(directory, **ONE_STEP), make(directory, **STREAMED)
    before = weights(streamed)
    monkeypatch.setattr(streamed._loss, "token_losses", FailsOnce(streamed._loss.token_losses, good_calls))
    with pytest.raises(RuntimeError, match="fell off the bus"):
        for group in groups_of(batch_of(0), range(6)):
            streamed.stream(group, 0, max_staleness=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(streamed).items())
    assert streamed.num_streamed_groups == 0
    expected = whole.update(batch_of(0), 0, max_staleness=1).metrics
    found = stream_all(streamed, 0, (3, 4, 5, 0, 1, 2))
    assert_same_metrics(expected, found)
    assert_same(weights(whole), weights(streamed))
    assert streamed.optimizer_step == 1


def test_a_bad_row_is_refused_by_name_and_streams_nothing(directory: Path) -> None:
    learner = make(directory, **STREAMED)
    rows = batch_of(0)
    learner.stream(rows[:3], 0)
    rows[3].behaviour_logprobs[4] = math.nan
    with pytest.raises(ValueError, match=re.escape(rows[3].trajectory_id)):
        learner.stream(rows[3:6], 0)
    assert learner.num_streamed_groups == 0
    learner.stream(rows[:3], 0)
    with pytest.raises(ValueError, match="was added|were added before"):
        learner.stream(rows[:3], 0)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_nan_gradient_never_reaches_the_weights(directory: Path, monkeypatch, on_nonfinite: str) -> None:
    learner = make(directory, **STREAMED, on_nonfinite=on_nonfinite)
    before, losses = weights(learner), learner._loss.token_losses
    monkeypatch.setattr(learner._loss, "token_losses", lambda *of: _times(losses(*of), math.nan))
    for group in groups_of(batch_of(0), range(6)):
        learner.stream(group, 0, max_staleness=1)
    if on_nonfinite == "stop":
        with pytest.raises(NonFiniteUpdate, match="update 0: loss nan"):
            learner.update(batch_of(0), 0, max_staleness=1)
    else:
        report = learner.update(batch_of(0), 0, max_staleness=1)
        assert report.optimizer_steps == 0 and report.skipped is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())


def _times(losses: Any, factor: float) -> Any:
    losses.values_N.mul_(1.0)
    return type(losses)(losses.values_N * factor, losses.ratio_N, losses.clipped_N, losses.sums, losses.counts)


def stream_two(config: dict[str, Any], make_learner: Callable[..., Learner], rank: int) -> Any:
    learner = make_learner(**config)
    metrics = [stream_all(learner, 0, (5, 1, 2, 0, 4, 3)), stream_all(learner, 1, (2, 3, 0, 1, 5, 4), late=3)]
    return learner.tensors(), metrics


@pytest.mark.slow
def test_two_ranks_stream_what_one_trains(directory: Path) -> None:
    """A denominator with a bucket a family, a critic and corrections; and one with a single bucket."""
    configs = [
        {**STREAMED, **ALGORITHMS["gae_in_one_family"]},
        {**STREAMED, **ALGORITHMS["corrected"], "normaliser": "token_mean"},
    ]
    answers = on_ranks(2, directory, *[partial(stream_two, config) for config in configs])
    for config, ranks in zip(configs, answers, strict=True):
        whole = make(directory, **{**config, "streamed": False})
        expected = [whole.update(batch_of(version), version, max_staleness=1).metrics for version in (0, 1)]
        assert_same(weights(whole), ranks[0][0])
        for rank in ranks:
            for one, other in zip(expected, rank[1], strict=True):
                assert_same_metrics({**one, "num_ranks": 0}, {**other, "num_ranks": 0})


# -- what cannot be streamed -------------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "training.minibatches is 2": {"minibatches": 2},
    "training.epochs is 3": {"epochs": 3},
    "training.backend is 'simulated'": {"backend": "simulated"},
    "training.normaliser is 'm:f'": {"normaliser": "m:f"},
    "training.advantage.estimator is 'gdpo'": {"advantage": {"estimator": "gdpo"}},
    "training.advantage.estimator is 'reinforce_plus_plus'": {"advantage": {"estimator": "reinforce_plus_plus"}},
    "training.advantage.estimator is 'reinforce_plus_plus_baseline'": {
        "advantage": {"estimator": "reinforce_plus_plus_baseline"}
    },
    "training.advantage.normalisation is 'batch'": {"advantage": {"normalisation": "batch"}},
    "training.families.maze.advantage.normalisation is 'family'": {
        "families": {"maze": {"advantage": {"normalisation": "family"}}}
    },
    "training.advantage.scaling is 'batch'": {"advantage": {"scaling": "batch"}},
    "training.corrections is 'm2po'": {"corrections": [{"name": "m2po"}]},
    "training.families.maze.corrections is 'm2po'": {"families": {"maze": {"corrections": [{"name": "m2po"}]}}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_needs_the_whole_batch_is_refused_at_start(message: str) -> None:
    settings = {"minibatches": 1, **REFUSED[message]}
    TrainingConfig.model_validate(settings)
    with pytest.raises(ValueError, match=re.escape(f"training.streamed is true, but {message}, ")) as refused:
        TrainingConfig.model_validate({**settings, "streamed": True})
    assert "or set training.streamed to false" in str(refused.value)


class GroupwiseGRPO(GRPO):
    streams = True


class GroupwiseMask(StalenessMask):
    streams = True


class BatchwiseGRPO(GRPO):
    pass


class BatchwiseMask(StalenessMask):
    pass


def test_a_plug_in_says_itself_whether_it_can_be_streamed(directory: Path) -> None:
    def settings(estimator: type, mask: type) -> dict[str, Any]:
        return {
            "advantage": AdvantageConfig(estimator=f"{__name__}:{estimator.__name__}"),
            "corrections": (CorrectionConfig(name=f"{__name__}:{mask.__name__}"),),
        }

    Algorithms(TrainingConfig(**STREAMED, **settings(GroupwiseGRPO, GroupwiseMask)))
    for pair, setting in (
        ((BatchwiseGRPO, GroupwiseMask), "training.advantage.estimator"),
        ((GroupwiseGRPO, BatchwiseMask), "training.corrections"),
    ):
        Algorithms(TrainingConfig(**ONE_STEP, **settings(*pair)))
        with pytest.raises(ValueError, match=f"{re.escape(setting)} is .*Batchwise.* streams = True"):
            Algorithms(TrainingConfig(**STREAMED, **settings(*pair)))
