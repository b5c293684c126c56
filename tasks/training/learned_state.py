"""What updates change: the policy's weights or its adapter, the optimizer's moments, the critic.

And the forms in which it leaves the learner and comes back: a published version, a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch

from resources.object_store import ObjectStore
from resources.policy.directory import policy_files, weights_digest
from resources.weights.manifest import AdapterEntry
from tasks.training.checkpoint import (
    LearnerCounters,
    check_checkpoint,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from tasks.training.config import TrainingConfig
from tasks.training.critic import CRITIC_FILE, Critic, stored_critic
from tasks.training.lora import adapter_entry, adapter_files, adapter_tensors, add_adapter, merged_tensors
from tasks.training.model import load_policy, policy_tensors
from tasks.training.optimizer import build_optimizer
from tasks.training.ranks import Ranks
from tasks.training.sharding import sharded_forward, whole


class LearnedState:
    """Policy, optimizer and critic of one learner. One thread at a time.

    With several ranks each holds its shards; `tensors`, `save` and `restore` are called on all of them.
    """

    def __init__(
        self, model_directory: str | Path, config: TrainingConfig, *, seed: int, device: str, ranks: Ranks
    ) -> None:
        """Arguments as in `Learner`."""
        self.config = config
        self.seed = seed
        self.ranks = ranks
        self.model_directory = Path(model_directory)
        self.model = load_policy(model_directory, config.layout, device)
        self.base: str | None = None
        """Digest of the frozen weights beside which an adapter is trained; None without LoRA."""
        self.scaling = None if config.lora is None else config.lora.scaling
        if config.lora is not None:
            self.base = weights_digest(model_directory)
            add_adapter(self.model, config.lora, seed)
        self.forward = sharded_forward(self.model, config, ranks, recompute_layers=config.gradient_checkpointing)
        self.optimizer = build_optimizer(list(self.parameters().values()), config.optimizer)
        width = int(self.model.config.get_text_config().hidden_size)
        self.critic = None if config.critic is None else Critic(width, config.critic, device)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer moves, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def learned(self) -> dict[str, torch.Tensor]:
        """What an update changes of the policy, by name: all of it, or its adapter. The live tensors."""
        tensors = policy_tensors(self.model)
        return tensors if self.config.lora is None else {name: tensors[name] for name in self.parameters()}

    @property
    def adapter(self) -> AdapterEntry | None:
        """Of the adapter that versions hold; None: they hold the whole policy."""
        lora = self.config.lora
        if lora is None or lora.publish == "merged":
            return None
        assert self.base is not None, "LoRA has a base"
        return adapter_entry(lora, self.base)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of what a version holds, on the CPU, by name, contiguous: the adapter by PEFT's names, or the whole
        policy, a tied head left out, an adapter merged. Every rank takes part; the first one gets them, the others
        nothing."""
        tensors = policy_tensors(self.model)
        lora = self.config.lora
        if lora is None:
            published = ((name, whole(each)) for name, each in tensors.items())
        else:
            published = adapter_tensors(tensors) if self.adapter else merged_tensors(tensors, lora)
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in published:
            if self.ranks.rank == 0:
                copies[name] = tensor.detach().cpu().clone().contiguous()
        return copies

    def files(self, base: str | None = None) -> dict[str, bytes]:
        """Configuration and tokenizer files that make a published version loadable by itself. With ``base``, where the
        base lies: the configuration of the adapter, which makes it loadable beside that."""
        if base is None:
            return policy_files(self.model_directory)
        assert self.config.lora is not None, "only an adapter has a base"
        return adapter_files(self.config.lora, base)

    def save(self, store: ObjectStore, prefix: str, counters: LearnerCounters) -> None:
        """Write a checkpoint under ``prefix``; complete once ``state.json`` lies there."""
        save_checkpoint(
            store,
            prefix,
            self.learned(),
            self.parameters(),
            self.optimizer,
            counters,
            base=self.base,
            scaling=self.scaling,
            more={} if self.critic is None else {CRITIC_FILE: self.critic.tensors()},
            writes=self.ranks.rank == 0,
        )

    def restore(self, store: ObjectStore, prefix: str) -> LearnerCounters:
        """Take over a checkpoint; returns where training stood. Errors as in `Learner.restore`."""
        stored = read_checkpoint(store, prefix)
        # Everything is checked before anything is changed.
        critic = None if self.critic is None else stored_critic(stored)
        if self.critic is not None and critic is not None:
            self.critic.check(critic)
        tensors, parameters = self.learned(), self.parameters()
        check_checkpoint(stored, tensors, parameters, seed=self.seed, base=self.base, scaling=self.scaling)
        load_checkpoint(stored, tensors, parameters, self.optimizer)
        if self.critic is not None and critic is not None:
            self.critic.load(critic)
        return stored.counters
