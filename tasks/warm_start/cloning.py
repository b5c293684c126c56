"""Behaviour cloning: the mean negative log-probability of the experts' action tokens, minimised by AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tasks.training.config import OptimizerConfig
from tasks.training.forward import PolicyForward
from tasks.training.optimizer import build_optimizer
from tasks.training.packing import PackableSequence, pack, plan_microbatches
from tasks.warm_start.config import WarmStartConfig

MAX_LOGITS_PER_CHUNK = 2**25


class BehaviourCloning:
    """Owns the optimizer; one `step` at a time."""

    def __init__(self, model: PreTrainedModel, config: WarmStartConfig, device: str = "cpu") -> None:
        self.config = config
        self.device = device
        self.num_steps_done = 0
        self._forward = PolicyForward(model, MAX_LOGITS_PER_CHUNK)
        self._optimizer = build_optimizer(
            list(model.parameters()),
            OptimizerConfig(learning_rate=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay),
        )
        self._parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def step(self, sequences: Sequence[PackableSequence]) -> float:
        """One optimizer step on the token mean over all action tokens; returns it, in nats, as it was before the step.

        Raises:
            ValueError: no action token in any sequence.
            FloatingPointError: a loss or gradient that is not finite (the weights are not changed).
        """
        sequences = [sequence for sequence in sequences if sequence.trained[1:].any()]
        num_tokens = sum(int(sequence.trained[1:].sum()) for sequence in sequences)
        if not num_tokens:
            raise ValueError("the episodes of a warm-start step hold no action token; is context_length too short?")
        self._optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        lengths = [len(sequence.token_ids) for sequence in sequences]
        for indices in plan_microbatches(lengths, self.config.max_tokens_per_microbatch):
            logprobs_N, _ = self._forward.logprobs(pack(sequences, indices, device=self.device))
            part = -logprobs_N.sum() / num_tokens
            part.backward()
            loss += float(part.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"warm start, step {self.num_steps_done}: loss {loss}, gradient norm {norm}; "
                "lower warm_start.learning_rate"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(self.num_steps_done, self.config)
        self._optimizer.step()
        self.num_steps_done += 1
        return loss


def learning_rate_at(step: int, config: WarmStartConfig) -> float:
    """Linear warm-up, constant, then linear towards 0 over the last ``decay_fraction`` of the steps (never 0
    itself)."""
    rate = config.learning_rate
    if step < config.warmup_steps:
        rate *= (step + 1) / config.warmup_steps
    decay_steps = round(config.decay_fraction * config.num_steps)
    steps_left = config.num_steps - step
    return rate * min(1.0, steps_left / (decay_steps + 1))
