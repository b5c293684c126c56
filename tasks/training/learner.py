"""The learner: turns policy version v and the rows of batch v into version v + 1.

One update: advantages of all rows -> training masks -> optimizer steps (`steps`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from resources.object_store import ObjectStore
from resources.policy.directory import policy_files, weights_digest
from resources.weights.manifest import AdapterEntry
from tasks.training.advantages.base import AdvantageInputs
from tasks.training.algorithms import Algorithms
from tasks.training.checkpoint import LearnerCounters, restore_checkpoint, save_checkpoint
from tasks.training.config import TrainingConfig
from tasks.training.critic import CRITIC_FILE, Critic, read_critic
from tasks.training.forward import PolicyForward
from tasks.training.lora import adapter_entry, adapter_files, adapter_tensors, add_adapter, merged_tensors
from tasks.training.masks import derive_masks, is_beyond_bound, trainable_tokens
from tasks.training.metrics import batch_metrics
from tasks.training.model import load_policy, policy_tensors
from tasks.training.normalisers import build_normaliser
from tasks.training.objective import Objective
from tasks.training.optimizer import build_optimizer
from tasks.training.packing import MicroBatch, PackableSequence
from tasks.training.ranks import OneRank, Ranks
from tasks.training.reference import AdapterOff, FrozenCopy, Reference, reward_penalties
from tasks.training.row import TrainingRow
from tasks.training.schedule import learning_rate_at
from tasks.training.sharding import shard, whole
from tasks.training.steps import StepsReport, TrainableRows, UpdateSteps
from tasks.training.token_reads import read_sampled_tokens


@dataclass(frozen=True, slots=True)
class UpdateReport:
    version: int
    """The version that the learner holds now."""
    metrics: dict[str, Any]
    """Flat names to finite numbers, and ``notes``, when there is something to say, to a list of sentences."""
    optimizer_steps: int
    """Steps of this update; 0 when it was skipped."""
    skipped: str | None = None
    """Why no step was taken; None when one was."""


class Learner:
    """Owns weights, optimizer and counters. One thread at a time.

    Args:
        model_directory: Hugging Face directory of a causal LM.
        config: algorithm and optimizer.
        seed: of the order of rows; draws derive from (seed, version, epoch), so no generator has to be carried along.
        device: torch device.
        threads: torch threads of this process.
        total_updates: length of the learning-rate schedule when the configuration does not name it.
        ranks: the ranks that share the work; None: this process alone. With several, every method that updates, saves
            or copies is called on all of them, with the same arguments.
    """

    def __init__(
        self,
        model_directory: str | Path,
        config: TrainingConfig,
        *,
        seed: int,
        device: str = "cpu",
        threads: int = 1,
        total_updates: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        self.config = config
        self.seed = seed
        self.device = device
        self.ranks: Ranks = ranks or OneRank()
        self.total_updates = total_updates
        self.model_directory = Path(model_directory)
        self.version = 0
        self.optimizer_step = 0
        self.skipped_updates = 0
        self.skipped_steps = 0
        self._failure: str | None = None
        self.algorithms = Algorithms(config)
        self._loss = Objective(self.algorithms)
        self._normalise = build_normaliser(config)
        self.model = load_policy(model_directory, config.layout, device)
        self.base = None
        if config.lora is not None:
            self.base = weights_digest(model_directory)
            add_adapter(self.model, config.lora, seed)
        self._vocabulary_size = int(self.model.config.get_text_config().vocab_size)
        self._forward = self._sharded_forward(self.model, config.gradient_checkpointing)
        self._reference = self._build_reference() if self._loss.needs_reference else None
        self._optimizer = build_optimizer(list(self._parameters().values()), config.optimizer)
        width = int(self.model.config.get_text_config().hidden_size)
        self._critic = None if config.critic is None else Critic(width, config.critic, device)

    @property
    def needs_components(self) -> bool:
        """Whether an algorithm wants the named parts of the pool's rewards."""
        return self.algorithms.needs_components

    def update(
        self,
        rows: Sequence[TrainingRow],
        version: int,
        *,
        num_families: int | None = None,
        max_staleness: int | None = None,
    ) -> UpdateReport:
        """Train on batch ``version``; the learner then holds ``version + 1``.

        A batch without any token to train (all groups dead or unscored) changes no weight: the update is skipped, said
        so and counted, and the version advances all the same.

        Args:
            num_families: that share the loss equally; None: those that occur in ``rows``.
            max_staleness: tokens sampled more versions ago than this are masked; None: all are trained.

        Raises:
            ValueError: a row that cannot be trained on, or a batch that is not the next one (nothing has changed then).
            NonFiniteUpdate: NaN or infinite loss or gradient, with ``on_nonfinite: stop``.
            RuntimeError: an earlier update failed half-way; `restore` first.
        """
        if self._failure is not None:
            raise RuntimeError(f"the learner's weights are unknown ({self._failure}); restore a checkpoint first")
        if version != self.version:
            raise ValueError(
                f"the learner holds version {self.version}; batch {version} is not the next one to train on"
            )
        started = time.perf_counter()
        for row in rows:
            row.validate(version=version, vocabulary_size=self._vocabulary_size)
        self._agree(rows, version)
        reference_RT = None if self._reference is None else self._read_sampled(rows, self._reference.logprobs)
        inputs = self._advantage_inputs(rows, version, max_staleness, reference_RT)
        advantages = self.algorithms.estimate(inputs)
        masks = derive_masks(
            rows,
            advantages.excluded_R,
            version=version,
            max_staleness=max_staleness,
            truncated_rows=self.config.truncated_rows,
        )
        metrics = batch_metrics(rows, advantages, masks, version)
        notes: list[str] = []
        skipped = None
        live = [index for index, mask in enumerate(masks.trained_RT) if mask.any()]
        trainable = TrainableRows(
            sequences=[PackableSequence(rows[i].token_ids, masks.trained_RT[i], rows[i].temperature) for i in live],
            families=[rows[i].family for i in live],
            advantages_RT=[advantages.values_RT[i] for i in live],
            behaviour_RT=[rows[i].behaviour_logprobs for i in live],
            versions_RT=[rows[i].token_versions for i in live],
            num_families=num_families or len({row.family for row in rows}),
            version=version,
            rewards_R=[rows[i].reward or 0.0 for i in live],
            values_RT=None if inputs.values_RT is None else [inputs.values_RT[i] for i in live],
            reference_RT=None if reference_RT is None else [reference_RT[i] for i in live],
            returns_RT=None if advantages.returns_RT is None else [advantages.returns_RT[i] for i in live],
        )
        steps_taken = 0
        if live:
            metrics["learning_rate"] = self._set_learning_rate(version)
            report = self._take_steps(trainable, version)
            metrics |= report.metrics
            steps_taken = report.optimizer_steps
            self.optimizer_step += report.optimizer_steps
            self.skipped_steps += report.skipped_steps
            if report.skipped_steps:
                notes.append(
                    f"{report.skipped_steps} optimizer steps were dropped: loss or gradient was NaN or infinite"
                )
                skipped = notes[-1] if not steps_taken else None
        else:
            self.skipped_updates += 1
            skipped = (
                f"update {version} took no step and changed no weight: {len(rows)} trajectories hold no token to train "
                f"(sampled tokens masked by cause: {masks.masked_tokens or 'none was sampled'})"
            )
            notes.append(skipped)
        self.version = version + 1
        update_s = time.perf_counter() - started
        processed = sum(len(sequence.token_ids) for sequence in trainable.sequences) * self.config.epochs
        metrics |= {
            "optimizer_steps": steps_taken,
            "optimizer_steps/total": self.optimizer_step,
            "optimizer_steps/skipped_total": self.skipped_steps,
            "skipped_updates_total": self.skipped_updates,
            "tokens/processed": processed,
            "tokens_per_s": processed / update_s,
            "time/learner_s": update_s,
        }
        if notes:
            metrics["notes"] = notes
        return UpdateReport(self.version, metrics, steps_taken, skipped)

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

    def save(self, store: ObjectStore, prefix: str) -> None:
        """Write a checkpoint under ``prefix``; complete once ``state.json`` lies there."""
        counters = LearnerCounters(
            self.seed, self.version, self.optimizer_step, self.skipped_updates, self.skipped_steps
        )
        save_checkpoint(
            store,
            prefix,
            self._learned(),
            self._parameters(),
            self._optimizer,
            counters,
            base=self.base,
            more={} if self._critic is None else {CRITIC_FILE: self._critic.tensors()},
            writes=self.ranks.rank == 0,
        )

    def restore(self, store: ObjectStore, prefix: str) -> None:
        """Go on from a checkpoint: the next update is bitwise the one that would have followed it.

        Raises:
            KeyError: there is no complete checkpoint.
            ValueError: it is damaged, of another model, or of a run with another seed (nothing has changed then).
        """
        critic = None if self._critic is None else read_critic(store, prefix)
        counters = restore_checkpoint(
            store, prefix, self._learned(), self._parameters(), self._optimizer, seed=self.seed, base=self.base
        )
        if self._critic is not None and critic is not None:
            self._critic.load(critic)
        self.version = counters.version
        self.optimizer_step = counters.optimizer_step
        self.skipped_updates = counters.skipped_updates
        self.skipped_steps = counters.skipped_steps
        self._failure = None

    def _advantage_inputs(
        self,
        rows: Sequence[TrainingRow],
        version: int,
        max_staleness: int | None,
        reference_RT: list[np.ndarray] | None,
    ) -> AdvantageInputs:
        return AdvantageInputs(
            rows=rows,
            trainable_RT=[trainable_tokens(row, version, max_staleness, self.config.truncated_rows) for row in rows],
            counted_R=[not is_beyond_bound(row, version, max_staleness) for row in rows],
            penalty_RT=None if reference_RT is None else reward_penalties(self.algorithms, rows, reference_RT),
            values_RT=None if self._critic is None else self._read_values(rows, self._critic),
        )

    def _read_values(self, rows: Sequence[TrainingRow], critic: Critic) -> list[np.ndarray]:
        return self._read_sampled(rows, lambda batch: critic.values(self._forward.tokens(batch).hidden_ND))

    def _read_sampled(
        self, rows: Sequence[TrainingRow], compute: Callable[[MicroBatch], torch.Tensor]
    ) -> list[np.ndarray]:
        return read_sampled_tokens(rows, compute, self.config, self.device, self.ranks)

    def _sharded_forward(self, model: PreTrainedModel, recompute_layers: bool = False) -> PolicyForward:
        forward = PolicyForward(
            model,
            self.config.max_logits_per_chunk,
            precision=self.config.precision,
            recompute_layers=recompute_layers,
        )
        shard(forward, self.ranks)
        return forward

    def _build_reference(self) -> Reference:
        directory = self.config.reference.model_directory if self.config.reference else None
        if directory is None and self.config.lora is not None:
            return AdapterOff(self._forward)
        model = load_policy(directory or self.model_directory, self.config.layout, self.device)
        if (size := int(model.config.get_text_config().vocab_size)) != self._vocabulary_size:
            raise ValueError(
                f"training.reference.model_directory is {directory!r}, whose vocabulary holds {size} tokens, the "
                f"policy's {self._vocabulary_size}; give a model with the policy's tokenizer"
            )
        return FrozenCopy(self._sharded_forward(model))

    def _agree(self, rows: Sequence[TrainingRow], version: int) -> None:
        """Ranks that hold different batches would add up gradients of different losses."""
        if self.ranks.size == 1:
            return
        digest = hashlib.sha256(repr([(row.trajectory_id, row.reward) for row in rows]).encode()).hexdigest()
        digests = self.ranks.gather(digest)
        if len(set(digests)) > 1:
            raise ValueError(f"update {version}: the learner's ranks read different batches (digests {digests})")

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer moves, by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _learned(self) -> dict[str, torch.Tensor]:
        """What an update changes, by name: all of the policy, or its adapter."""
        tensors = policy_tensors(self.model)
        return tensors if self.config.lora is None else {name: tensors[name] for name in self._parameters()}

    def _set_learning_rate(self, version: int) -> float:
        learning_rate = learning_rate_at(version, self.config.optimizer, self.total_updates)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    def _take_steps(self, rows: TrainableRows, version: int) -> StepsReport:
        steps = UpdateSteps(
            rows,
            forward=self._forward,
            loss=self._loss,
            normalise=self._normalise,
            optimizer=self._optimizer,
            config=self.config,
            device=self.device,
            critic=self._critic,
            ranks=self.ranks,
        )
        try:
            return steps.run(version=version, seed=self.seed)
        except BaseException as error:
            # Some steps may have been taken and others not: such weights are no version.
            self._failure = f"update {version} failed: {type(error).__name__}: {error}"
            raise
