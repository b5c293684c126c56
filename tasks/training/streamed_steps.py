"""The one optimizer step of an update whose rows arrive while the batch fills.

Gradients are added up without the denominators, which nobody knows yet, in one buffer a bucket (`streaming`), and
scaled when the batch is whole: the step is that of the whole batch (StreamRL, arXiv 2504.15930). A micro-batch runs as
soon as every rank has enough tokens to fill one. With a family token mean memory grows by a gradient for every family
beyond the first; every other denominator has one bucket, no more than the gradient that a step needs anyway.
"""

from __future__ import annotations

import numpy as np
import torch

from tasks.training.metrics import StepSums
from tasks.training.passes import RowPasses, UpdateParts
from tasks.training.prepared import TrainableRows
from tasks.training.steps import OptimizerSteps, StepsReport
from tasks.training.streaming import bucket_of, row_factor


class StreamedSteps:
    """Made anew for each update; before `finish` no weight has changed, and it may be dropped at any time.

    On every rank the same rows are added in the same order.
    """

    def __init__(self, parts: UpdateParts) -> None:
        self.ranks, self.normalise, self.config = parts.ranks, parts.normalise, parts.config
        self.passes: RowPasses | None = None
        """None until there is a row to train."""
        self._parts = parts
        self._steps = OptimizerSteps(parts)
        self.sums = StepSums()
        self._waiting: dict[str, list[int]] = {}
        """By bucket: rows that no pass has seen, fewer than a micro-batch of them a rank."""
        self._gradients: dict[str, list[torch.Tensor | None]] = {}
        """By bucket, in the order of the parameters: the sum so far, without the scale."""
        self._losses: dict[str, torch.Tensor] = {}
        """By bucket: this rank's part of the loss, without the scale."""
        self._steps.zero_gradients()

    def add(self, rows: TrainableRows) -> None:
        """Rows of further groups. What fills a micro-batch runs at once."""
        if not rows.sequences:
            return
        if self.passes is None:
            self.passes = RowPasses(rows, self._parts)
            new = list(range(len(rows.sequences)))
        else:
            new = self.passes.append(rows)
        for row in new:
            self._waiting.setdefault(self._bucket(self.passes, row), []).append(row)
        enough = self.config.max_tokens_per_microbatch * self.ranks.size
        for bucket, waiting in self._waiting.items():
            if sum(len(self.passes.rows.sequences[row].token_ids) for row in waiting) >= enough:
                self._run(self.passes, bucket)

    @property
    def num_tokens_run(self) -> int:
        """Tokens of the rows that went through the model already, on all ranks."""
        if self.passes is None:
            return 0
        waiting = {row for rows in self._waiting.values() for row in rows}
        lengths = [len(sequence.token_ids) for sequence in self.passes.rows.sequences]
        return sum(length for row, length in enumerate(lengths) if row not in waiting)

    def accumulate_gradient(self, num_families: int) -> tuple[float, float]:
        """The batch is whole: run what waits, scale, clip. Returns the loss, and the norm before the clip."""
        assert self.passes is not None, "there is a row to train"
        for bucket in self._waiting:
            self._run(self.passes, bucket)
        loss = torch.zeros((), device=self._parts.device)
        for bucket, scale in self._scales(self.passes, num_families).items():
            loss += scale * self._losses[bucket]
            for parameter, gradient in zip(self._steps.parameters, self._gradients.pop(bucket), strict=True):
                if gradient is not None:
                    gradient.mul_(scale)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        norm = self._steps.clip(self.sums)
        return float(self.ranks.sum(loss)), norm

    def finish(self, num_families: int, version: int) -> StepsReport:
        """Take the step. Raises NonFiniteUpdate; no weight has changed then."""
        loss, norm = self.accumulate_gradient(num_families)
        assert self.passes is not None
        # Their weights were computed part by part; what is reported of them is over all rows.
        corrected = self.passes.prepare_corrections()
        sums = self.sums if self._steps.take(version, loss, norm) else StepSums()
        self._steps.zero_gradients()
        return self._steps.report({**self.passes.read_metrics(sums, version), **corrected})

    def _run(self, passes: RowPasses, bucket: str) -> None:
        """Forward and backward of the rows that wait in a bucket, onto its sum."""
        rows, self._waiting[bucket] = self._waiting[bucket], []
        if not rows:
            return
        passes.prepare_corrections(rows)
        parameters = self._steps.parameters
        for parameter, gradient in zip(parameters, self._gradients.get(bucket, [None] * len(parameters)), strict=True):
            parameter.grad = gradient
        factors = {row: self._factor(passes, row) for row in rows}
        loss = passes.backward(rows, factors, self.sums, at_start=True)
        self._losses[bucket] = self._losses.get(bucket, torch.zeros_like(loss)) + loss
        self._gradients[bucket] = [parameter.grad for parameter in parameters]
        self._steps.zero_gradients()

    def _scales(self, passes: RowPasses, num_families: int) -> dict[str, float]:
        """By bucket: what the update's own denominators leave over when a row's factor is taken out."""
        weights_R = self.normalise(passes.num_tokens_R, passes.rows.families, num_families)
        shares: dict[str, list[float]] = {}
        for row, weight in enumerate(weights_R):
            shares.setdefault(self._bucket(passes, row), []).append(float(weight) / self._factor(passes, row))
        for bucket, values in shares.items():
            assert np.ptp(values) <= 1e-9 * max(values), ("rows of a bucket share a scale", bucket, values)
        return {bucket: values[0] for bucket, values in shares.items()}

    def _factor(self, passes: RowPasses, row: int) -> float:
        family = self.config.families.get(passes.rows.families[row])
        weight = 1.0 if family is None else family.weight
        return row_factor(self.config.normaliser, int(passes.num_tokens_R[row]), weight)

    def _bucket(self, passes: RowPasses, row: int) -> str:
        return bucket_of(self.config.normaliser, passes.rows.families[row])
