"""Loss and gradient do not depend on the number of ranks: random batches, dealt to ranks that share one process.

Every rank is a thread with a model of its own, and runs the passes that it runs in a process of its own; what FSDP2
does with the gradients, a sum over ranks, is done here. Ranks in processes: `test_tasks_training_ranks`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tasks.training.algorithm_config import CorrectionConfig, FamilyTrainingConfig
from tasks.training.config import LossConfig, OptimizerConfig, TrainingConfig
from tasks.training.model import load_policy
from tasks.training.passes import UpdateParts
from tasks.training.plugins import NORMALISERS
from tasks.training.prepared import TrainableRows
from tasks.training.ranks import OneRank, Ranks
from tasks.training.steps import UpdateSteps
from tasks.training.streamed_steps import StreamedSteps
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_steps import LOSS_CONFIGS, MASKS, parts_of, random_rows

MOST_RANKS = 3
WEIGHTS = (CorrectionConfig(name="truncated_weight", level="sequence_mean"),)
NO_CLIP = OptimizerConfig(max_grad_norm=1e9)


class ThreadRanks:
    """One of several ranks, each in a thread of its own."""

    mesh = None

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, said: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._said = meeting, said

    def gather(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        self._meeting.wait(60)
        answers = list(self._said)
        self._meeting.wait(60)
        return answers

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(value)).sum(0)

    def interrupt(self) -> None:
        self._meeting.abort()

    def leave(self) -> None:
        return None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[PreTrainedModel]:
    directory: Path = make_model_directory(tmp_path_factory.mktemp("model"))
    return [load_policy(directory, "packed", "cpu") for _ in range(MOST_RANKS)]


def whole_step(rows: TrainableRows, parts: UpdateParts) -> tuple[float, dict[str, Any]]:
    steps = UpdateSteps(rows, parts)
    corrected = steps.passes.prepare_corrections()
    sums, loss, _ = steps.accumulate_gradient(range(len(rows.sequences)), at_start=True)
    return loss, {**steps.passes.read_metrics(sums, rows.version), **corrected}


def streamed_step(rows: TrainableRows, parts: UpdateParts) -> tuple[float, dict[str, Any]]:
    steps = StreamedSteps(parts)
    steps.add(rows)
    loss, _ = steps.accumulate_gradient(rows.num_families)
    assert steps.passes is not None
    corrected = steps.passes.prepare_corrections()
    return loss, {**steps.passes.read_metrics(steps.sums, rows.version), **corrected}


Step = Callable[[TrainableRows, UpdateParts], tuple[float, dict[str, Any]]]


def on_threads(
    size: int, models: list[PreTrainedModel], rows: TrainableRows, config: TrainingConfig, step: Step
) -> tuple[list[tuple[float, dict[str, Any]]], torch.Tensor]:
    """What every rank says of the step, and the sum of their gradients."""
    meeting, said = threading.Barrier(size), [None] * size
    shares: list[Ranks] = [ThreadRanks(rank, size, meeting, said) for rank in range(size)]

    def work(ranks: Ranks) -> tuple[float, dict[str, Any]]:
        try:
            return step(rows, parts_of(config, models[ranks.rank], ranks=ranks))
        except BaseException:
            ranks.interrupt()
            raise

    with ThreadPoolExecutor(size) as threads:
        answers = list(threads.map(work, shares))
    return answers, torch.stack([flat_gradient(model) for model in models[:size]]).sum(0)


def flat_gradient(model: PreTrainedModel) -> torch.Tensor:
    """Of all parameters; 0 where a rank had no row for one."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients]).clone()


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 24), min_size=1, max_size=7),
    size=st.integers(2, MOST_RANKS),
    budget=st.integers(1, 80),
    normaliser=st.sampled_from(sorted(NORMALISERS)),
    loss=st.sampled_from(LOSS_CONFIGS),
    other_loss=st.sampled_from([None, *LOSS_CONFIGS]),
    corrections=st.sampled_from([(), MASKS, WEIGHTS]),
    streamed=st.booleans(),
    seed=st.integers(0, 5),
)
def test_loss_and_gradient_do_not_depend_on_the_number_of_ranks(
    models, lengths, size, budget, normaliser, loss, other_loss, corrections, streamed, seed
) -> None:
    """More ranks than rows among them, whole and streamed, with a family that does otherwise."""
    if corrections is WEIGHTS:
        loss = other_loss = LossConfig(name="policy_gradient")
    streamed = streamed and corrections is not MASKS  # m2po wants the whole batch
    config = TrainingConfig(
        normaliser=normaliser,
        fixed_length_tokens=16 if normaliser == "fixed_length" else None,
        loss=loss,
        corrections=corrections,
        families={"sums": FamilyTrainingConfig(loss=other_loss, weight=2.0)},
        max_tokens_per_microbatch=budget,
        minibatches=1,
        streamed=streamed,
        optimizer=NO_CLIP,
    )
    rows = random_rows(seed, lengths, ["maze" if i % 3 else "sums" for i in range(len(lengths))])
    at_once = config.model_copy(update={"streamed": False})
    expected_loss, expected = whole_step(rows, parts_of(at_once, models[0], ranks=OneRank()))
    gradient = flat_gradient(models[0])
    answers, found = on_threads(size, models, rows, config, streamed_step if streamed else whole_step)
    assert float((found - gradient).abs().max()) <= 1e-6 * max(1.0, float(gradient.abs().max()))
    for loss_value, metrics in answers:
        assert loss_value == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
