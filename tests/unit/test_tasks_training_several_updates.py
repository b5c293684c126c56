"""Weights after several updates against a plain loop: float64, one row and one token at a time, all logits at once, no
packing, no chunks, no PEFT, transformers' eager attention. What the learner combines is tried in combination."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.training.algorithm_config import AdvantageConfig, CriticConfig, KLConfig
from tasks.training.config import LoraConfig, LossConfig, OptimizerConfig, TrainingConfig
from tasks.training.learner import Learner
from tasks.training.minibatches import deal_minibatches
from tasks.training.prepared import PreparedRows, TrainableRows
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import VOCABULARY
from tests.unit.test_tasks_training_streamed import batch_of

SEED, NUM_UPDATES, NUM_FAMILIES = 3, 3, 2
TOLERANCE = 2e-6
"""Of weights that a step moves by up to 1e-3."""
# Micro-batches of a few rows, chunks of three positions, a clip that is always active.
COMMON: dict[str, Any] = {
    "optimizer": OptimizerConfig(learning_rate=1e-3, warmup_updates=2, adam_epsilon=1e-4, max_grad_norm=0.3),
    "max_tokens_per_microbatch": 40,
    "max_logits_per_chunk": 3 * VOCABULARY,
}
KL = KLConfig(coefficient=0.1)
GAE: dict[str, Any] = {"advantage": AdvantageConfig(estimator="gae")}
SETTINGS: dict[str, dict[str, Any]] = {
    "all_weights": {"minibatches": 3, "epochs": 2, "loss": LossConfig(entropy_coefficient=0.05)},
    "reference_and_critic": {"kl": KL, **GAE, "critic": CriticConfig(), "minibatches": 2},
    "everything": {
        "lora": LoraConfig(rank=4, alpha=8),
        "gradient_checkpointing": True,
        "kl": KL,
        **GAE,
        "critic": CriticConfig(train_decoder=True),
        "loss": LossConfig(name="decoupled", entropy_coefficient=0.02),
        "minibatches": 2,
        "epochs": 2,
    },
    "sequence_mean_padded": {"normaliser": "sequence_mean", "layout": "padded", "minibatches": 1},
}


class PlainLoop:
    """The same updates. Takes advantages, returns and masks from the learner: they have tests of their own."""

    def __init__(self, directory: Path, learner: Learner) -> None:
        self.config = config = learner.config
        self.model, self.reference = (
            AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").eval()
            for _ in range(2)
        )
        self.adapter: dict[str, torch.Tensor] = {}
        if config.lora is not None:
            self.model.requires_grad_(False)
            for name, start in learner.model.named_parameters():
                if ".lora_" in name:
                    self.adapter[name] = start.detach().double().requires_grad_()
        self.trained = self.adapter or dict(self.model.named_parameters())
        decayed = [p for p in self.trained.values() if p.ndim > 1]
        others = [p for p in self.trained.values() if p.ndim < 2]
        optimizer = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.adam_epsilon,
        )
        width = int(self.model.config.hidden_size)
        self.head = [torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in (width, 1)]
        critic = config.critic or CriticConfig()
        self.head_optimizer = torch.optim.AdamW(self.head, lr=critic.learning_rate, weight_decay=0.0)

    def run(self, model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of one row."""
        merged = {}
        if model is self.model and self.config.lora is not None:
            weights = dict(model.named_parameters())
            for name, up in self.adapter.items():
                if ".lora_B." in name:
                    layer = name.partition(".lora_B.")[0]
                    product = up @ self.adapter[name.replace(".lora_B.", ".lora_A.")]
                    factor = self.config.lora.alpha / self.config.lora.rank
                    merged[f"{layer}.weight"] = weights[f"{layer}.weight"] + factor * product
        inputs = {"input_ids": ids[None], "output_hidden_states": True, "use_cache": False}
        outputs = torch.func.functional_call(model, merged, args=(), kwargs=inputs)
        return outputs.hidden_states[-1][0], outputs.logits[0]

    def update(self, prepared: PreparedRows, version: int, learning_rate: float) -> tuple[float, float]:
        """Mean loss and mean gradient norm of the steps."""
        rows = prepared.trainable(NUM_FAMILIES)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        with torch.no_grad():
            start = [self.logprobs(self.model, rows, row)[2] for row in range(len(rows.sequences))]
        losses, norms = [], []
        for epoch in range(self.config.epochs):
            order = np.random.default_rng([SEED, version, epoch])
            for minibatch in deal_minibatches(rows.families, self.config.minibatches, order):
                self.optimizer.zero_grad()
                self.head_optimizer.zero_grad()
                loss = self.loss(rows, minibatch, start)
                loss.backward()
                losses.append(float(loss.detach()))
                norms.append(clip(list(self.trained.values()), self.config.optimizer.max_grad_norm))
                if self.config.critic is not None:
                    clip(self.head, self.config.critic.max_grad_norm)
                    self.head_optimizer.step()
                self.optimizer.step()
        return sum(losses) / len(losses), sum(norms) / len(norms)

    def logprobs(self, model: Any, rows: TrainableRows, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states [T, D]; log-probabilities of the whole vocabulary [T, V], and of the next tokens [T - 1]."""
        ids = torch.tensor(np.asarray(rows.sequences[row].token_ids, np.int64))
        hidden, logits = self.run(model, ids)
        everything = torch.log_softmax(logits / rows.sequences[row].temperature, -1)
        return hidden, everything, everything[:-1].gather(-1, ids[1:, None])[:, 0]

    def loss(self, rows: TrainableRows, minibatch: list[int], start: list[torch.Tensor]) -> torch.Tensor:
        config, tokens_of = self.config, Counter()
        for row in minibatch:
            tokens_of[rows.families[row]] += int(rows.sequences[row].trained.sum())
        total = torch.zeros((), dtype=torch.float64)
        for row in minibatch:
            hidden, everything, chosen = self.logprobs(self.model, rows, row)
            with torch.no_grad():
                reference = self.logprobs(self.reference, rows, row)[2]
            positions = rows.sequences[row].trained.nonzero()[0].tolist()
            weight = 1.0 / (tokens_of[rows.families[row]] * NUM_FAMILIES)
            if config.normaliser == "sequence_mean":
                weight = 1.0 / (len(positions) * len(minibatch))
            for t in positions:
                advantage, behaviour = float(rows.advantages_RT[row][t]), float(rows.behaviour_RT[row][t])
                current, proximal = chosen[t - 1], start[row][t - 1]
                decoupled = config.loss.name == "decoupled"
                ratio = torch.exp(current - (proximal if decoupled else behaviour))
                value = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                if decoupled:
                    value = value * min(2.0, math.exp(float(proximal) - behaviour))
                difference = reference[t - 1] - current
                value = value + config.kl.coefficient * (torch.exp(difference) - difference - 1)
                p = everything[t - 1]
                value = value + config.loss.entropy_coefficient * (p.exp() * p).sum()
                total = total + weight * (value + self.value_loss(rows, row, t, hidden[t - 1]))
        return total

    def value_loss(self, rows: TrainableRows, row: int, t: int, hidden: torch.Tensor) -> torch.Tensor | float:
        critic = self.config.critic
        returns_T = None if rows.returns_RT is None else rows.returns_RT[row]
        if critic is None or returns_T is None or rows.values_RT is None:
            return 0.0
        value = (hidden if critic.train_decoder else hidden.detach()) @ self.head[0] + self.head[1][0]
        start, target = float(rows.values_RT[row][t]), float(returns_T[t])
        bounded = start + (value - start).clamp(-critic.value_clip, critic.value_clip)
        factor = critic.coefficient if critic.train_decoder else 1.0
        return 0.5 * factor * torch.maximum((value - target) ** 2, (bounded - target) ** 2)


def clip(parameters: list[Any], largest: float) -> float:
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in parameters))
    for parameter in parameters:
        parameter.grad *= min(1.0, largest / (norm + 1e-6))
    return norm


@pytest.mark.parametrize(("name", "tied"), [*((name, True) for name in SETTINGS), ("everything", False)])
def test_weights_after_several_updates_are_those_of_a_plain_loop(
    name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_model_directory(tmp_path, tied=tied)
    learner = Learner(directory, TrainingConfig(**COMMON, **SETTINGS[name]), seed=SEED)
    start = {key: parameter.detach().clone() for key, parameter in learner._state.parameters().items()}
    plain = PlainLoop(directory, learner)
    taken: list[PreparedRows] = []
    prepare = learner._prepare

    def taking(*arguments: Any, **named: Any) -> PreparedRows:
        taken.append(prepare(*arguments, **named))
        return taken[-1]

    monkeypatch.setattr(learner, "_prepare", taking)
    for version in range(NUM_UPDATES):
        metrics = learner.update(batch_of(version), version, max_staleness=1).metrics
        loss, norm = plain.update(taken[-1], version, metrics["learning_rate"])
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert norm > learner.config.optimizer.max_grad_norm, "the clip is active"
    found = learner._state.parameters()
    assert found.keys() == plain.trained.keys()
    for key, expected in plain.trained.items():
        assert float((found[key].double() - expected).detach().abs().max()) <= TOLERANCE, key
    assert max(float((found[key] - old).detach().abs().max()) for key, old in start.items()) > 100 * TOLERANCE
    if learner._critic is not None:
        head = learner._critic.head
        for expected, parameter in zip(plain.head, (head.weight[0], head.bias), strict=True):
            assert float((parameter.double() - expected).detach().abs().max()) <= TOLERANCE
            assert float(expected.detach().abs().max()) > 100 * TOLERANCE
