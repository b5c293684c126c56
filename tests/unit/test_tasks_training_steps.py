"""The gradient of an optimizer step: equal to a separate computation, whatever the micro-batches. M5, M9."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from tasks.training.algorithm_config import CorrectionConfig, FamilyTrainingConfig
from tasks.training.algorithms import Algorithms
from tasks.training.config import LossConfig, TrainingConfig
from tasks.training.forward import PolicyForward
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.model import load_policy
from tasks.training.normalisers import Normaliser, build_normaliser, family_token_mean, sequence_mean, token_mean
from tasks.training.objective import Objective
from tasks.training.optimizer import build_optimizer
from tasks.training.packing import PackableSequence
from tasks.training.passes import UpdateParts
from tasks.training.plugins import LOSSES, NORMALISERS
from tasks.training.prepared import TrainableRows
from tasks.training.ranks import OneRank, Ranks
from tasks.training.steps import NonFiniteUpdate, UpdateSteps
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import VOCABULARY


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory: Path) -> PreTrainedModel:
    return load_policy(directory, "packed", "cpu")


@pytest.fixture(scope="module")
def padded_model(directory: Path) -> PreTrainedModel:
    return load_policy(directory, "padded", "cpu")


def random_rows(seed: int, lengths: Sequence[int], families: Sequence[str], temperature: float = 0.8) -> TrainableRows:
    rng = np.random.default_rng(seed)
    sequences = []
    for length in lengths:
        mask = rng.random(length) < 0.4
        mask[0], mask[rng.integers(1, length)] = False, True
        sequences.append(PackableSequence(rng.integers(0, VOCABULARY, length), mask, temperature))
    return TrainableRows(
        sequences=sequences,
        families=list(families),
        advantages_RT=[np.full(length, rng.normal(), np.float32) for length in lengths],
        behaviour_RT=[rng.uniform(-5, -1, length).astype(np.float32) for length in lengths],
        versions_RT=[rng.integers(0, 4, length).astype(np.int32) for length in lengths],
        num_families=len(set(families)),
        version=3,
        rewards_R=[float(rng.integers(0, 2)) for _ in lengths],
    )


def parts_of(
    config: TrainingConfig, model: PreTrainedModel, *, normalise: Normaliser | None = None, ranks: Ranks | None = None
) -> UpdateParts:
    """Of an update without a critic. By default the configuration's denominator, on one rank."""
    return UpdateParts(
        forward=PolicyForward(model, config.max_logits_per_chunk),
        loss=Objective(Algorithms(config)),
        normalise=normalise or build_normaliser(config),
        optimizer=build_optimizer(list(model.parameters()), config.optimizer),
        config=config,
        device="cpu",
        ranks=ranks or OneRank(),
    )


def steps_over(rows: TrainableRows, model: PreTrainedModel, normalise: Normaliser, **changes) -> UpdateSteps:
    return UpdateSteps(rows, parts_of(TrainingConfig(**changes), model, normalise=normalise))


def gradient_of(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def reference_gradient(
    directory: Path, rows: TrainableRows, weight_of_row: Sequence[float]
) -> tuple[float, torch.Tensor]:
    """PPO clip in float64, one row and one token at a time, on transformers' own forward pass with all logits."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    total = torch.zeros((), dtype=torch.float64)
    for row, sequence in enumerate(rows.sequences):
        ids = torch.tensor(sequence.token_ids)
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0] / sequence.temperature, -1)
        for t in range(1, len(ids)):
            if sequence.trained[t]:
                ratio = torch.exp(logprobs[t - 1, ids[t]] - float(rows.behaviour_RT[row][t]))
                advantage = float(rows.advantages_RT[row][t])
                token = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                total = total + weight_of_row[row] * token
    total.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    gradient *= min(1.0, 1.0 / (float(gradient.norm()) + 1e-6))
    return float(total.detach()), gradient


def test_a_step_equals_a_separate_float64_computation(directory: Path, model: PreTrainedModel) -> None:
    rows = random_rows(0, [5, 14, 8, 21, 3], ["maze", "maze", "sums", "sums", "sums"])
    counts = [int(sequence.trained.sum()) for sequence in rows.sequences]
    of_family = {"maze": sum(counts[:2]), "sums": sum(counts[2:])}
    expected_loss, expected = reference_gradient(
        directory, rows, [1.0 / of_family[family] / 2 for family in rows.families]
    )
    steps = steps_over(rows, model, family_token_mean, max_tokens_per_microbatch=24)
    _, loss, _ = steps.accumulate_gradient(range(5), at_start=False)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert float((gradient_of(model).double() - expected).abs().max()) < 1e-6


LOSS_CONFIGS = [
    *(LossConfig(name=name) for name in LOSSES),
    LossConfig(name="ppo_clip", ratio_to="proximal", dual_clip=1.5, entropy_coefficient=0.1),
    LossConfig(name="decoupled", behaviour_weight_level="sequence_mean"),
    LossConfig(name="decoupled", proximal="loglinear"),
    LossConfig(name="topr", behaviour_weight_level="sequence_sum"),
]
MASKS = (CorrectionConfig(name="m2po"), CorrectionConfig(name="staleness_mask", max_staleness=2))
WEIGHTS = (CorrectionConfig(name="truncated_weight", level="sequence_mean"), CorrectionConfig(name="ratio_mask"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(2, 24), min_size=1, max_size=8),
    budget=st.integers(1, 80),
    layout=st.sampled_from(["packed", "padded"]),
    normaliser=st.sampled_from(sorted(NORMALISERS)),
    loss=st.sampled_from(LOSS_CONFIGS),
    other_loss=st.sampled_from([None, *LOSS_CONFIGS]),
    corrections=st.sampled_from([(), MASKS, WEIGHTS]),
    seed=st.integers(0, 5),
)
def test_loss_and_gradient_do_not_depend_on_split_or_packing(
    model: PreTrainedModel,
    padded_model: PreTrainedModel,
    lengths: list[int],
    budget: int,
    layout: Literal["packed", "padded"],
    normaliser: str,
    loss: LossConfig,
    other_loss: LossConfig | None,
    corrections: tuple[CorrectionConfig, ...],
    seed: int,
) -> None:
    """Every loss and denominator, alone and beside another family's, in one micro-batch and in many, packed and
    padded."""
    if corrections is WEIGHTS:
        loss = LossConfig(name="policy_gradient", ratio_to=loss.ratio_to)
    rows = random_rows(seed, lengths, ["maze" if i % 3 else "sums" for i in range(len(lengths))])
    results = []
    for max_tokens, used, used_layout in (
        (10_000, model, "packed"),
        (budget, *other_model(layout, model, padded_model)),
    ):
        config = {
            "normaliser": normaliser,
            "fixed_length_tokens": 16 if normaliser == "fixed_length" else None,
            "max_tokens_per_microbatch": max_tokens,
            "layout": used_layout,
            "loss": loss,
            "corrections": corrections,
            "families": {"sums": FamilyTrainingConfig(loss=other_loss, weight=2.0)}
            if corrections is not WEIGHTS
            else {},
        }
        steps = steps_over(rows, used, build_normaliser(TrainingConfig(**config)), **config)
        corrected = steps.passes.prepare_corrections()
        sums, value, _ = steps.accumulate_gradient(range(len(lengths)), at_start=True)
        results.append((value, gradient_of(used), {**sums.read(), **corrected}))
    (whole, gradient, metrics), (split, split_gradient, split_metrics) = results
    assert split == pytest.approx(whole, rel=1e-5, abs=1e-6)
    assert float((gradient - split_gradient).abs().max()) <= 1e-6
    assert metrics.keys() == split_metrics.keys()
    for name, value in metrics.items():
        assert split_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def other_model(layout, model: PreTrainedModel, padded_model: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    return (model, "packed") if layout == "packed" else (padded_model, "padded")


def test_a_correction_masks_without_inflating_the_rest(model: PreTrainedModel) -> None:
    """Masked tokens leave the loss and stay in the denominator; they are counted under the first cause."""
    rows = random_rows(2, [9, 14], ["maze", "maze"])
    loss, strict = LossConfig(name="policy_gradient"), CorrectionConfig(name="staleness_mask", max_staleness=1)
    steps = steps_over(rows, model, token_mean, loss=loss, corrections=(strict, strict))
    metrics = steps.passes.prepare_corrections()
    trained = [sequence.trained for sequence in rows.sequences]
    stale = [3 - versions[mask] > 1 for versions, mask in zip(rows.versions_RT, trained, strict=True)]
    num_stale, num_tokens = (sum(int(each.sum()) for each in many) for many in (stale, trained))
    assert 0 < metrics["tokens/masked/staleness_mask"] == num_stale < num_tokens
    assert metrics["correction/weight"] == pytest.approx(1 - num_stale / num_tokens)
    _, value, _ = steps.accumulate_gradient([0, 1], at_start=True)
    expected = sum(
        -float(advantages[0]) * float(logprobs[~old].sum())
        for advantages, logprobs, old in zip(
            rows.advantages_RT,
            (steps.passes.start_logprobs[0].numpy(), steps.passes.start_logprobs[1].numpy()),
            stale,
            strict=True,
        )
    )
    assert value == pytest.approx(expected / num_tokens, rel=1e-5)


def test_m7_both_sequence_weights_are_logged_whichever_is_used(model: PreTrainedModel) -> None:
    rows = random_rows(2, [9, 14], ["maze", "maze"])
    loss = LossConfig(name="policy_gradient")
    for level in ("sequence_sum", "sequence_mean"):
        corrections = (CorrectionConfig(name="truncated_weight", level=level, high=0.1),)
        metrics = steps_over(rows, model, token_mean, loss=loss, corrections=corrections).passes.prepare_corrections()
        assert metrics["correction/weight"] <= 0.1 + 1e-6
        assert metrics["behaviour_weight/sequence_sum"] != metrics["behaviour_weight/sequence_mean"]


class FixedLoss:
    """One loss value for all tokens of a row, whatever the model says."""

    needs_proximal = False

    def __init__(self, config: LossConfig) -> None:
        self.values = torch.tensor(config.arguments["values"])

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        # The behaviour log-probability carries the row's number here.
        row_N = (-inputs.behaviour_logprobs_N).long()
        values_N = self.values[row_N] + 0.0 * inputs.current_logprobs_N
        return TokenLosses(values_N, torch.ones_like(values_N).detach(), torch.zeros_like(row_N, dtype=torch.bool))


@pytest.mark.parametrize("budget", [1, 5, 10_000])
def test_m9_token_mean_over_any_split(model: PreTrainedModel, budget: int) -> None:
    """M9: lengths 1 and 9, per-token loss 1 and 0: 0.1."""
    rows = TrainableRows(
        sequences=[PackableSequence(np.arange(n + 1), np.arange(n + 1) > 0) for n in (1, 9)],
        families=["maze", "maze"],
        advantages_RT=[np.ones(n + 1, np.float32) for n in (1, 9)],
        behaviour_RT=[np.full(n + 1, -row, np.float32) for row, n in enumerate((1, 9))],
        versions_RT=[np.zeros(n + 1, np.int32) for n in (1, 9)],
        num_families=1,
    )
    for normalise, expected in ((token_mean, 0.1), (family_token_mean, 0.1), (sequence_mean, 0.5)):
        loss = LossConfig(name=f"{__name__}:FixedLoss", arguments={"values": [1.0, 0.0]})
        steps = steps_over(rows, model, normalise, max_tokens_per_microbatch=budget, loss=loss)
        _, loss, _ = steps.accumulate_gradient([0, 1], at_start=False)
        assert loss == pytest.approx(expected, rel=1e-6)


class BrokenLoss(FixedLoss):
    """NaN for every token."""

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        fixed = super().token_losses(inputs)
        return TokenLosses(fixed.values_N * math.nan, fixed.ratio_N, fixed.clipped_N)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_nan_loss_never_reaches_the_weights(directory: Path, on_nonfinite) -> None:
    model = load_policy(directory, "packed", "cpu")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    rows = random_rows(1, [6, 7], ["maze", "maze"])
    loss = LossConfig(name=f"{__name__}:BrokenLoss", arguments={"values": [0.0] * 6})
    steps = steps_over(rows, model, token_mean, minibatches=2, on_nonfinite=on_nonfinite, loss=loss)
    if on_nonfinite == "stop":
        with pytest.raises(NonFiniteUpdate, match="update 3: loss nan"):
            steps.run(version=3, seed=0)
    else:
        report = steps.run(version=3, seed=0)
        assert (report.optimizer_steps, report.skipped_steps) == (0, 2)
        assert all(math.isfinite(value) for value in report.metrics.values())
        assert "loss" not in report.metrics
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
