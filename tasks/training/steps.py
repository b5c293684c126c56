"""The optimizer steps of one update: minibatches, denominators, the clip, and what if a step is not finite.

The gradient of a step is that of the whole minibatch: denominators are taken over the minibatch before it is split into
micro-batches, and over ranks, whose gradients only add up (`passes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from resources.failures import RollartError
from tasks.training.metrics import StepSums
from tasks.training.minibatches import deal_minibatches
from tasks.training.passes import RowPasses, UpdateParts
from tasks.training.prepared import TrainableRows
from tasks.training.sharding import whole


class NonFiniteUpdate(RollartError):
    """Loss or gradient is NaN or infinite; raised before the weights change."""


@dataclass(frozen=True, slots=True)
class StepsReport:
    metrics: dict[str, Any]
    optimizer_steps: int
    skipped_steps: int


class OptimizerSteps:
    """Clips accumulated gradients and moves policy and critic, for one update."""

    def __init__(self, parts: UpdateParts) -> None:
        self._optimizer, self._critic = parts.optimizer, parts.critic
        self._config, self._ranks = parts.config, parts.ranks
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._num_skipped = 0
        self._policy = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        head = [] if self._critic is None else list(self._critic.head.parameters())
        self.parameters: list[torch.nn.Parameter] = [*self._policy, *head]
        """What the gradients of an update are of: the policy's, then the critic's."""

    def zero_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self, sums: StepSums) -> float:
        """The policy's gradient norm before the clip, or the critic's where that one is not finite; the critic's goes
        into ``sums``."""
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._policy, self._config.optimizer.max_grad_norm)))
        if self._critic is not None:
            self._critic.sum_gradients(self._ranks)
            critic_norm = self._critic.clip_gradient()
            sums.add_means({"critic/grad_norm": critic_norm[None]})
            norm = norm if math.isfinite(critic_norm) else float(critic_norm)
        return norm

    def take(self, version: int, loss: float, norm: float) -> bool:
        """Move along the gradients, unless loss or norm is not finite; whether it was done. Raises NonFiniteUpdate."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            if self._config.on_nonfinite == "stop":
                raise NonFiniteUpdate(
                    f"update {version}: loss {loss}, gradient norm {norm}; the step was not taken. Lower "
                    "training.optimizer.learning_rate, or set training.on_nonfinite to 'skip' to go on without such "
                    "steps"
                )
            self._num_skipped += 1
            return False
        self._optimizer.step()
        if self._critic is not None:
            self._critic.optimizer.step()
        self._losses.append(loss)
        self._norms.append(norm)
        return True

    def report(self, metrics: dict[str, Any]) -> StepsReport:
        """``metrics`` with those of the steps that were taken."""
        if self._losses:
            metrics = metrics | {
                "loss": sum(self._losses) / len(self._losses),
                "grad_norm": sum(self._norms) / len(self._norms),
                "grad_norm/max": max(self._norms),
            }
        return StepsReport(metrics, len(self._losses), self._num_skipped)


class UpdateSteps:
    """Takes the steps of one update whose rows are all there. Made anew for each one."""

    def __init__(self, rows: TrainableRows, parts: UpdateParts) -> None:
        self.rows = rows
        self.passes = RowPasses(rows, parts)
        self.ranks, self.normalise, self.config = parts.ranks, parts.normalise, parts.config
        self._steps = OptimizerSteps(parts)

    def run(self, *, version: int, seed: int) -> StepsReport:
        """All epochs. Raises NonFiniteUpdate."""
        sums = StepSums()
        corrected = self.passes.prepare_corrections()
        num_steps = 0
        for epoch in range(self.config.epochs):
            rng = np.random.default_rng([seed, version, epoch])
            minibatches = deal_minibatches(self.rows.families, self.config.minibatches, rng)
            if epoch == 0 and self.passes.loss.needs_proximal:
                for minibatch in minibatches[1:]:
                    self.passes.read_start_logprobs(minibatch)
            for minibatch in minibatches:
                # The first step's own forward pass still runs on the weights of the start.
                step_sums, loss, norm = self.accumulate_gradient(minibatch, at_start=num_steps == 0)
                num_steps += 1
                if self._steps.take(version, loss, norm):
                    sums.merge(step_sums)
        self._steps.zero_gradients()
        return self._steps.report({**self.passes.read_metrics(sums, version), **corrected})

    def accumulate_gradient(self, minibatch: Sequence[int], *, at_start: bool) -> tuple[StepSums, float, float]:
        """Gradient of a whole minibatch, clipped. Returns sums for the metrics, the loss, and the norm before the
        clip."""
        self._steps.zero_gradients()
        sums = StepSums()
        weights = self.normalise(
            self.passes.num_tokens_R[minibatch], [self.rows.families[row] for row in minibatch], self.rows.num_families
        )
        weight_of = dict(zip(minibatch, weights, strict=True))
        loss = self.passes.backward(minibatch, weight_of, sums, at_start=at_start)
        norm = self._steps.clip(sums)
        return sums, float(self.ranks.sum(loss)), norm
