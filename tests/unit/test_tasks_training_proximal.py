"""The proximal policy is the learner with which the update starts: in every minibatch, in every epoch, for corrections
as for losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.training.algorithm_config import CorrectionConfig
from tasks.training.config import LossConfig, OptimizerConfig
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.model import load_policy
from tasks.training.normalisers import token_mean
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_steps import random_rows, steps_over

SEEN: list[LossInputs] = []
"""What `Watching` was given since a test emptied it."""


class Watching:
    """The policy gradient; remembers what it was given."""

    needs_proximal = True

    def __init__(self, config: LossConfig) -> None:
        del config

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        SEEN.append(inputs)
        ones_N = torch.ones_like(inputs.behaviour_logprobs_N)
        return TokenLosses(-inputs.advantages_N * inputs.current_logprobs_N, ones_N, ones_N < 0)


@pytest.mark.parametrize("corrected", [False, True])
def test_the_proximal_policy_stays_that_of_the_start(tmp_path: Path, corrected: bool) -> None:
    directory = make_model_directory(tmp_path)
    rows = random_rows(4, [9, 14, 6, 11, 17], ["maze", "sums", "maze", "maze", "sums"])
    # A token's behaviour log-probability is its name here.
    count = iter(range(1, 1000))
    rows.behaviour_RT[:] = [np.array([-0.01 * next(count) for _ in row], np.float32) for row in rows.behaviour_RT]
    start = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    expected = {}
    for sequence, names in zip(rows.sequences, rows.behaviour_RT, strict=True):
        ids = torch.tensor(sequence.token_ids)
        with torch.no_grad():
            logprobs = torch.log_softmax(start(input_ids=ids[None]).logits[0] / sequence.temperature, -1)
        for t in sequence.trained.nonzero()[0].tolist():
            expected[float(names[t])] = float(logprobs[t - 1, ids[t]])

    SEEN.clear()
    steps = steps_over(
        rows,
        load_policy(directory, "packed", "cpu"),
        token_mean,
        loss=LossConfig(name=f"{__name__}:Watching"),
        corrections=(CorrectionConfig(name="truncated_weight", high=0.5),) if corrected else (),
        minibatches=3,
        epochs=2,
        max_tokens_per_microbatch=20,
        optimizer=OptimizerConfig(learning_rate=0.05, warmup_updates=0),
    )
    assert steps.run(version=3, seed=0).optimizer_steps == 6
    moved, times = 0, dict.fromkeys(expected, 0)
    for inputs in SEEN:
        assert inputs.proximal_logprobs_N is not None
        for name, proximal, current in zip(
            inputs.behaviour_logprobs_N.tolist(),
            inputs.proximal_logprobs_N.tolist(),
            inputs.current_logprobs_N.tolist(),
            strict=True,
        ):
            assert proximal == pytest.approx(expected[name], abs=1e-5)
            moved += abs(current - proximal) > 1e-3
            times[name] += 1
    assert set(times.values()) == {2}, "each token once an epoch"
    assert moved > len(expected), "the steps change the current policy"
    if corrected:
        for row, weights in steps.passes.correction_weights.items():
            names = rows.behaviour_RT[row][rows.sequences[row].trained].tolist()
            assert weights.tolist() == pytest.approx([min(np.exp(expected[n] - n), 0.5) for n in names], rel=1e-4)
