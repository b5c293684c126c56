"""Forward and backward passes over the rows of an update, and what is remembered of them until it ends.

Ranks share the rows: each runs its own, in as many micro-batches as the others. Gradients of micro-batches only add up,
so how rows are split changes nothing. Legend: R trained rows, T tokens of a row, N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tasks.training.config import TrainingConfig
from tasks.training.correcting import correction_weights
from tasks.training.critic import Critic
from tasks.training.forward import PolicyForward
from tasks.training.losses.base import LossInputs
from tasks.training.metrics import Mismatch, StepSums, mismatch_metrics
from tasks.training.minibatches import deal_to_ranks
from tasks.training.normalisers import Normaliser
from tasks.training.objective import Objective
from tasks.training.packing import MicroBatch, filler, pack, plan_microbatches
from tasks.training.prepared import TrainableRows
from tasks.training.ranks import OneRank, Ranks


@dataclass(frozen=True, slots=True)
class UpdateParts:
    """What the passes and steps of an update work with. They outlive it."""

    forward: PolicyForward
    loss: Objective
    normalise: Normaliser
    optimizer: torch.optim.Optimizer
    config: TrainingConfig
    device: str
    critic: Critic | None = None
    ranks: Ranks = field(default_factory=OneRank)


class RowPasses:
    """Made anew for each update; owns nothing that outlives it."""

    def __init__(self, rows: TrainableRows, parts: UpdateParts) -> None:
        self.rows = rows
        self.forward, self.loss, self.config = parts.forward, parts.loss, parts.config
        self.device, self.critic, self.ranks = parts.device, parts.critic, parts.ranks
        self.num_tokens_R = _num_trained(rows)
        self.start_logprobs: dict[int, torch.Tensor] = {}
        """By row: log-probabilities of its trained tokens under the weights with which the update started."""
        self.correction_weights: dict[int, torch.Tensor] = {}
        """By row: weights of its trained tokens; without a row: 1."""
        self._rank_of_row: dict[int, int] = {}
        """A row stays on the rank that ran it first: what was computed of it before lies there."""
        self._read: set[int] = set()
        """Rows whose start log-probabilities were computed by themselves, on whatever rank."""

    def append(self, rows: TrainableRows) -> list[int]:
        """Further rows of the update; their numbers."""
        start = len(self.num_tokens_R)
        self.rows = self.rows.followed_by(rows)
        self.num_tokens_R = np.concatenate([self.num_tokens_R, _num_trained(rows)])
        return list(range(start, len(self.num_tokens_R)))

    def backward(
        self, rows: Sequence[int], weight_of: Mapping[int, float], sums: StepSums, *, at_start: bool
    ) -> torch.Tensor:
        """Add the gradient of the rows' loss to that of the parameters.

        Args:
            weight_of: by row: what each of its tokens counts.
            sums: for the metrics; added to.
            at_start: no step was taken yet.

        Returns this rank's part of the loss.
        """
        loss = torch.zeros((), device=self.device)
        for batch in self._microbatches(rows):
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
        return loss

    def prepare_corrections(self, rows: Sequence[int] | None = None) -> dict[str, float]:
        """Weights of the off-policy corrections, before the first step; None: of all rows. Returns metrics of those
        rows."""
        algorithms = self.loss.algorithms
        if not any(algorithm.corrections for algorithm in algorithms.all):
            return {}
        rows = range(len(self.rows.sequences)) if rows is None else rows
        trained = [self.rows.sequences[row].trained for row in rows]
        known: dict[int, torch.Tensor] = {}
        if any(correction.needs_proximal for algorithm in algorithms.all for correction in algorithm.corrections):
            self.read_start_logprobs(rows)
            known = self._of_all_ranks({row: self.start_logprobs[row] for row in rows if row in self.start_logprobs})
        log_ratios_R = {
            place: known[row] - self._tensor(self.rows.behaviour_RT[row][mask])
            for place, (row, mask) in enumerate(zip(rows, trained, strict=True))
            if row in known
        }
        staleness_R = [
            torch.as_tensor(self.rows.version - self.rows.versions_RT[row][mask].astype(np.int64), device=self.device)
            for row, mask in zip(rows, trained, strict=True)
        ]
        families_R = [self.rows.families[row] for row in rows]
        weights, metrics = correction_weights(algorithms, families_R, log_ratios_R, staleness_R)
        self.correction_weights.update((rows[place], weights_N) for place, weights_N in weights.items())
        return metrics

    def read_start_logprobs(self, rows: Sequence[int]) -> None:
        """A forward pass over those rows that were not read before. Before the first step."""
        rows = [row for row in rows if row not in self._read]
        self._read.update(rows)
        with torch.no_grad():
            for batch in self._microbatches(rows):
                self._keep_start_logprobs(batch, self.forward.logprobs(batch)[0])

    def read_metrics(self, sums: StepSums, version: int) -> dict[str, Any]:
        """Over all ranks."""
        total, own, drift = StepSums(), Mismatch(), Mismatch()
        for rank_sums, rank_own, rank_drift in self.ranks.gather((sums.on_host(), *self._mismatch(version))):
            total.merge(rank_sums)
            own, drift = own + rank_own, drift + rank_drift
        return {**total.read(), **mismatch_metrics(own, drift)}

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


def _num_trained(rows: TrainableRows) -> np.ndarray:
    return np.array([int(sequence.trained.sum()) for sequence in rows.sequences], np.int64)
