"""The optimizer steps of one update: minibatches, micro-batches, gradient accumulation.

The gradient of a step is that of the whole minibatch: denominators are taken over the minibatch before it is split, and
the micro-batches' gradients only add up. The same holds for ranks: each runs its share of every minibatch, in as many
micro-batches as the others. Legend: R trained rows of the update, T tokens of a row, N trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from resources.failures import RollartError
from tasks.training.config import TrainingConfig
from tasks.training.correcting import correction_weights
from tasks.training.critic import Critic
from tasks.training.forward import PolicyForward
from tasks.training.losses.base import LossInputs
from tasks.training.metrics import Mismatch, StepSums, mismatch_metrics
from tasks.training.minibatches import deal_minibatches, deal_to_ranks
from tasks.training.normalisers import Normaliser
from tasks.training.objective import Objective
from tasks.training.packing import MicroBatch, PackableSequence, filler, pack, plan_microbatches
from tasks.training.ranks import OneRank, Ranks
from tasks.training.sharding import whole


class NonFiniteUpdate(RollartError):
    """Loss or gradient is NaN or infinite; raised before the weights change."""


@dataclass(frozen=True, slots=True)
class TrainableRows:
    """R rows that have at least one trained token each."""

    sequences: list[PackableSequence]
    families: list[str]
    advantages_RT: list[np.ndarray]
    """float32 [T] each"""
    behaviour_RT: list[np.ndarray]
    """float32 [T] each"""
    versions_RT: list[np.ndarray]
    """int32 [T] each"""
    num_families: int
    """Families that share the loss equally."""
    version: int = 0
    """The learner's version when the update starts."""
    rewards_R: list[float] | None = None
    """Final reward of each row; None: 0."""
    values_RT: list[np.ndarray] | None = None
    """float32 [T] each: the critic's values when the update starts; None without a critic."""
    returns_RT: list[np.ndarray | None] | None = None
    """float32 [T] each: what the critic should have said; None for a row that teaches it nothing."""
    reference_RT: list[np.ndarray] | None = None
    """float32 [T] each: log-probabilities of sampled tokens under the reference policy; None: nothing asks for them."""


@dataclass(frozen=True, slots=True)
class StepsReport:
    metrics: dict[str, Any]
    optimizer_steps: int
    skipped_steps: int


class UpdateSteps:
    """Takes the steps of one update. Made anew for each one; owns nothing that outlives it."""

    def __init__(
        self,
        rows: TrainableRows,
        *,
        forward: PolicyForward,
        loss: Objective,
        normalise: Normaliser,
        optimizer: torch.optim.Optimizer,
        config: TrainingConfig,
        device: str,
        critic: Critic | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks: Ranks = ranks or OneRank()
        self.rows = rows
        self.forward = forward
        self.loss = loss
        self.normalise = normalise
        self.optimizer = optimizer
        self.config = config
        self.device = device
        self.critic = critic
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.num_tokens_R = np.array([int(sequence.trained.sum()) for sequence in rows.sequences])
        self.start_logprobs: dict[int, torch.Tensor] = {}
        """By row: log-probabilities of its trained tokens under the weights with which the update started."""
        self.correction_weights: dict[int, torch.Tensor] = {}
        """By row: weights of its trained tokens; without a row: 1."""
        self._rank_of_row: dict[int, int] = {}
        """A row stays on the rank that ran it first: what was computed of it before lies there."""
        self._all_read = False
        """Whether start log-probabilities of all rows are known."""

    def run(self, *, version: int, seed: int) -> StepsReport:
        """All epochs. Raises NonFiniteUpdate."""
        sums = StepSums()
        corrected = self.prepare_corrections()
        losses: list[float] = []
        norms: list[float] = []
        num_steps = 0
        for epoch in range(self.config.epochs):
            rng = np.random.default_rng([seed, version, epoch])
            minibatches = deal_minibatches(self.rows.families, self.config.minibatches, rng)
            if epoch == 0 and self.loss.needs_proximal and not self._all_read:
                for minibatch in minibatches[1:]:
                    self._read_start_logprobs(minibatch)
            for minibatch in minibatches:
                # The first step's own forward pass still runs on the weights of the start.
                step_sums, loss, norm = self.accumulate_gradient(minibatch, at_start=num_steps == 0 and epoch == 0)
                num_steps += 1
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    self._refuse(version, loss, norm)
                    continue
                self.optimizer.step()
                if self.critic is not None:
                    self.critic.optimizer.step()
                sums.merge(step_sums)
                losses.append(loss)
                norms.append(norm)
        self.optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, Any] = {**self._read_metrics(sums, version), **corrected}
        if losses:
            metrics |= {
                "loss": sum(losses) / len(losses),
                "grad_norm": sum(norms) / len(norms),
                "grad_norm/max": max(norms),
            }
        return StepsReport(metrics, len(losses), num_steps - len(losses))

    def accumulate_gradient(self, minibatch: Sequence[int], *, at_start: bool) -> tuple[StepSums, float, float]:
        """Gradient of a whole minibatch, clipped. Returns sums for the metrics, the loss, and the norm before the
        clip."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.optimizer.zero_grad(set_to_none=True)
        sums = StepSums()
        weights = self.normalise(
            self.num_tokens_R[minibatch], [self.rows.families[row] for row in minibatch], self.rows.num_families
        )
        weight_of = dict(zip(minibatch, weights, strict=True))
        loss = torch.zeros((), device=self.device)
        for batch in self._microbatches(minibatch):
            current_N, entropy_N, hidden_ND = self.forward.tokens(
                batch, entropy_gradient=self.loss.needs_entropy_gradient
            )
            if not batch.rows:
                # A pass for the sake of the other ranks.
                current_N.sum().backward()
                continue
            if at_start:
                self._keep_start_logprobs(batch, current_N.detach())
            inputs = LossInputs(
                current_logprobs_N=current_N,
                behaviour_logprobs_N=self._gather(self.rows.behaviour_RT, batch),
                proximal_logprobs_N=_joined(self.start_logprobs, batch) if self.loss.needs_proximal else None,
                reference_logprobs_N=(
                    None if self.rows.reference_RT is None else self._gather(self.rows.reference_RT, batch)
                ),
                advantages_N=self._gather(self.rows.advantages_RT, batch),
                sequence_N=batch.sequence_N,
                num_sequences=len(batch.rows),
                entropy_N=entropy_N,
                rewards_N=self._of_rows(self.rows.rewards_R, batch),
                staleness_N=(self.rows.version - self._gather(self.rows.versions_RT, batch)).long(),
            )
            token_losses = self.loss.token_losses(
                inputs, [self.rows.families[row] for row in batch.rows], self._correction_weights(batch)
            )
            weights_N = self._of_rows(weight_of, batch)
            part = (token_losses.values_N * weights_N).sum()
            if self.critic is not None:
                part = part + self._value_loss(self.critic, hidden_ND, batch, weights_N, sums)
            part.backward()
            loss += part.detach()
            sums.add(inputs, token_losses, entropy_N)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.max_grad_norm))
        if self.critic is not None:
            # Its loss is part of the loss: a head that is not finite is refused with it.
            self.critic.sum_gradients(self.ranks)
            sums.add_means({"critic/grad_norm": self.critic.clip_gradient()[None]})
        return sums, float(self.ranks.sum(loss)), float(norm)

    def prepare_corrections(self) -> dict[str, float]:
        """Weights of the off-policy corrections, for all rows at once and before the first step. Returns metrics."""
        algorithms = self.loss.algorithms
        if not any(algorithm.corrections for algorithm in algorithms.all):
            return {}
        if any(correction.needs_proximal for algorithm in algorithms.all for correction in algorithm.corrections):
            self._read_start_logprobs(range(len(self.rows.sequences)))
            self._all_read = True
        trained = [sequence.trained for sequence in self.rows.sequences]
        log_ratios_R = {
            row: logprobs - self._tensor(self.rows.behaviour_RT[row][trained[row]])
            for row, logprobs in self._of_all_ranks(self.start_logprobs).items()
        }
        staleness_R = [
            torch.as_tensor(self.rows.version - versions[mask].astype(np.int64), device=self.device)
            for versions, mask in zip(self.rows.versions_RT, trained, strict=True)
        ]
        self.correction_weights, metrics = correction_weights(algorithms, self.rows.families, log_ratios_R, staleness_R)
        return metrics

    def _correction_weights(self, batch: MicroBatch) -> torch.Tensor | None:
        if not self.correction_weights:
            return None
        parts = [
            self.correction_weights[row]
            if row in self.correction_weights
            else torch.ones(int(self.num_tokens_R[row]), device=self.device)
            for row in batch.rows
        ]
        return torch.cat(parts)

    def _value_loss(
        self, critic: Critic, hidden_ND: torch.Tensor, batch: MicroBatch, weights_N: torch.Tensor, sums: StepSums
    ) -> torch.Tensor:
        """The critic's part of the loss, over the rows that teach it."""
        assert self.rows.values_RT is not None and self.rows.returns_RT is not None, "read before the first step"
        taught_R = [self.rows.returns_RT[row] is not None for row in batch.rows]
        taught_N = torch.tensor(taught_R, device=self.device).index_select(0, batch.sequence_N).nonzero().squeeze(-1)
        returns_RT = [
            np.zeros_like(start) if returns is None else returns
            for start, returns in zip(self.rows.values_RT, self.rows.returns_RT, strict=True)
        ]
        values_N = critic.values(hidden_ND.index_select(0, taught_N))
        start_N, returns_N = (
            self._gather(each, batch).index_select(0, taught_N) for each in (self.rows.values_RT, returns_RT)
        )
        losses_N, clipped_N = critic.losses(values_N, start_N, returns_N)
        sums.add_means(
            {
                "critic/loss": losses_N.detach(),
                "critic/clip_share": clipped_N.float(),
                "critic/value": values_N.detach(),
                "critic/return": returns_N,
            }
        )
        return (losses_N * weights_N.index_select(0, taught_N)).sum()

    def _refuse(self, version: int, loss: float, norm: float) -> None:
        if self.config.on_nonfinite == "stop":
            raise NonFiniteUpdate(
                f"update {version}: loss {loss}, gradient norm {norm}; the step was not taken. Lower "
                "training.optimizer.learning_rate, or set training.on_nonfinite to 'skip' to go on without such steps"
            )

    def _microbatches(self, minibatch: Sequence[int]) -> list[MicroBatch]:
        """This rank's share of the minibatch; as many micro-batches on every rank."""
        plans = [self._plan(share) for share in self._shares(minibatch)]
        batches = [pack(self.rows.sequences, rows, self.config.layout, self.device) for rows in plans[self.ranks.rank]]
        missing = max(len(plan) for plan in plans) - len(batches)
        return [*batches, *(filler(self.config.layout, self.device) for _ in range(missing))]

    def _plan(self, rows: Sequence[int]) -> list[list[int]]:
        lengths = [len(self.rows.sequences[row].token_ids) for row in rows]
        plan = plan_microbatches(lengths, self.config.max_tokens_per_microbatch, self.config.layout)
        return [[rows[index] for index in indices] for indices in plan]

    def _shares(self, minibatch: Sequence[int]) -> list[list[int]]:
        new = [row for row in minibatch if row not in self._rank_of_row]
        lengths = [len(self.rows.sequences[row].token_ids) for row in new]
        for rank, share in enumerate(deal_to_ranks(lengths, self.ranks.size)):
            self._rank_of_row.update((new[index], rank) for index in share)
        return [[row for row in minibatch if self._rank_of_row[row] == rank] for rank in range(self.ranks.size)]

    def _read_start_logprobs(self, minibatch: Sequence[int]) -> None:
        with torch.no_grad():
            for batch in self._microbatches(minibatch):
                self._keep_start_logprobs(batch, self.forward.logprobs(batch)[0])

    def _keep_start_logprobs(self, batch: MicroBatch, logprobs_N: torch.Tensor) -> None:
        self.start_logprobs.update(self._by_row(batch, logprobs_N))

    def _by_row(self, batch: MicroBatch, values_N: torch.Tensor) -> dict[int, torch.Tensor]:
        parts = values_N.split(self.num_tokens_R[list(batch.rows)].tolist()) if batch.rows else ()
        return dict(zip(batch.rows, parts, strict=True))

    def _of_all_ranks(self, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if self.ranks.size == 1:
            return values
        gathered: dict[int, torch.Tensor] = {}
        for part in self.ranks.gather({row: value.cpu() for row, value in values.items()}):
            gathered.update(part)
        return {row: gathered[row].to(self.device) for row in sorted(gathered)}

    def _of_rows(self, values: Mapping[int, float] | Sequence[float] | None, batch: MicroBatch) -> torch.Tensor:
        """A number of each row, at its trained tokens: float32 [N]. None: 0."""
        numbers = [0.0 if values is None else values[row] for row in batch.rows]
        return torch.tensor(numbers, dtype=torch.float32, device=self.device).index_select(0, batch.sequence_N)

    def _gather(self, values_RT: Sequence[np.ndarray], batch: MicroBatch) -> torch.Tensor:
        """The trained positions of per-token arrays, in the order of the micro-batch: float32 [N]."""
        parts = [values_RT[row][self.rows.sequences[row].trained] for row in batch.rows]
        return self._tensor(np.concatenate(parts))

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=self.device)

    def _read_metrics(self, sums: StepSums, version: int) -> dict[str, Any]:
        """Over all ranks."""
        total, own, drift = StepSums(), Mismatch(), Mismatch()
        for rank_sums, rank_own, rank_drift in self.ranks.gather((sums.on_host(), *self._mismatch(version))):
            total.merge(rank_sums)
            own, drift = own + rank_own, drift + rank_drift
        return {**total.read(), **mismatch_metrics(own, drift)}

    def _mismatch(self, version: int) -> tuple[Mismatch, Mismatch]:
        """Of tokens of the learner's own version, and of older ones."""
        rows = sorted(self.start_logprobs)
        if not rows:
            return Mismatch(), Mismatch()
        trained = [self.rows.sequences[row].trained for row in rows]
        learner = torch.cat([self.start_logprobs[row] for row in rows]).cpu().numpy()
        engine = np.concatenate([self.rows.behaviour_RT[row][mask] for row, mask in zip(rows, trained, strict=True)])
        versions = np.concatenate([self.rows.versions_RT[row][mask] for row, mask in zip(rows, trained, strict=True)])
        own = versions == version
        return Mismatch.of((learner - engine)[own]), Mismatch.of((learner - engine)[~own])


def _joined(values: dict[int, torch.Tensor], batch: MicroBatch) -> torch.Tensor:
    """Values of the rows of a micro-batch, in its order: [N]."""
    return torch.cat([values[row] for row in batch.rows])
