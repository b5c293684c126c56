"""Who trains in `benchmarks.training`: the learner in three layouts, and a plain loop over a transformers model.

All take the same rows, minibatches, weights of tokens, loss (`ppo_clip`) and optimizer; only how rows lie in a batch
differs, and, for the plain loop, everything that the learner does to compute no more than it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.training_rows import Workload
from tasks.training.learner import Learner
from tasks.training.losses.ppo_clip import CLIP_HIGH, CLIP_LOW
from tasks.training.minibatches import deal_minibatches
from tasks.training.normalisers import build_normaliser
from tasks.training.optimizer import build_optimizer
from tasks.training.packing import plan_microbatches
from tasks.training.ranks import Ranks
from tasks.training.schedule import learning_rate_at

WHOLE_MINIBATCH = 2**31
"""A budget of tokens that no minibatch exceeds: it goes through the model as one batch."""


@dataclass(frozen=True)
class UpdateResult:
    """What one update said of itself: means over its optimizer steps."""

    loss: float
    grad_norm: float


Update = Callable[[int], UpdateResult]
"""Train on the workload as the batch of this version."""


@dataclass(frozen=True)
class Variant:
    """How rows are laid out."""

    name: str
    settings: Mapping[str, Any] | None
    """What its training configuration has otherwise than the quickstart's; None: the plain loop."""

    def build(self, workload: Workload, ranks: Ranks | None = None) -> Update:
        if self.settings is None:
            return PlainLoop(workload).update
        training = workload.training.model_copy(update=dict(self.settings))
        learner = Learner(workload.directory, training, seed=0, ranks=ranks)

        def update(version: int) -> UpdateResult:
            metrics = learner.update(workload.rows, version).metrics
            return UpdateResult(metrics["loss"], metrics["grad_norm"])

        return update

    def laid_out_tokens(self, workload: Workload) -> int:
        """Tokens that go through the model in an update, padding included."""
        settings = PADDED.settings if self.settings is None else self.settings
        training = workload.training.model_copy(update=dict(settings or {}))
        total = 0
        for rows in minibatches_of(workload):
            lengths = [len(workload.rows[row].token_ids) for row in rows]
            for indices in plan_microbatches(lengths, training.max_tokens_per_microbatch, training.layout):
                chosen = [lengths[index] for index in indices]
                total += sum(chosen) if training.layout == "packed" else len(chosen) * max(chosen)
        return total


PACKED = Variant("packed", {})
SORTED = Variant("padded, sorted by length", {"layout": "padded"})
PADDED = Variant("padded to the longest", {"layout": "padded", "max_tokens_per_microbatch": WHOLE_MINIBATCH})
PLAIN = Variant("transformers, padded", None)
VARIANTS = (PACKED, SORTED, PADDED, PLAIN)


def minibatches_of(workload: Workload, version: int = 0) -> list[list[int]]:
    """The rows of each optimizer step, as the learner deals them."""
    families = [workload.rows[index].family for index in workload.live]
    dealt = deal_minibatches(families, workload.training.minibatches, np.random.default_rng([0, version, 0]))
    return [[workload.live[place] for place in places] for places in dealt]


class PlainLoop:
    """What a training loop on transformers does: a padded batch, logits of every position, a weighted loss, a step."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        transformers_logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(
            workload.directory, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        self.optimizer = build_optimizer(list(self.model.parameters()), workload.training.optimizer)
        self.lowest, self.highest = workload.training.loss.clip_bounds(CLIP_LOW, CLIP_HIGH)
        self.normalise = build_normaliser(workload.training)
        self.num_families = len({row.family for row in workload.rows})

    def update(self, version: int) -> UpdateResult:
        optimizer = self.workload.training.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(version, optimizer, None)
        losses: list[float] = []
        norms: list[float] = []
        for rows in minibatches_of(self.workload, version):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(rows)
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), optimizer.max_grad_norm)))
            losses.append(float(loss.detach()))
            self.optimizer.step()
        return UpdateResult(sum(losses) / len(losses), sum(norms) / len(norms))

    def loss(self, rows: Sequence[int]) -> torch.Tensor:
        batch = self.collate(rows)
        logits = self.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        ).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        logprobs = logprobs.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
        ratio = (logprobs - batch["behaviour"][:, 1:]).exp()
        advantages = batch["advantages"][:, 1:]
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(self.lowest, self.highest) * advantages)
        return -(surrogate * batch["weights"][:, 1:]).sum()

    def collate(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """Padded on the right to the longest row, [B, L] each; the weight of a token that is not trained is 0."""
        workload = self.workload
        chosen = [workload.rows[row] for row in rows]
        num_tokens = np.array([int(workload.trained_RT[row].sum()) for row in rows])
        weights = self.normalise(num_tokens, [row.family for row in chosen], self.num_families)
        columns = {
            "input_ids": [torch.as_tensor(row.token_ids, dtype=torch.int64) for row in chosen],
            "attention_mask": [torch.ones(len(row.token_ids), dtype=torch.int64) for row in chosen],
            "behaviour": [torch.as_tensor(row.behaviour_logprobs) for row in chosen],
            "advantages": [torch.as_tensor(workload.advantages_RT[row]) for row in rows],
            "weights": [
                torch.as_tensor(workload.trained_RT[row] * weight, dtype=torch.float32)
                for row, weight in zip(rows, weights, strict=True)
            ],
        }
        return {name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in columns.items()}
