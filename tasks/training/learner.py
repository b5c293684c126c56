"""The learner: turns policy version v and the rows of batch v into version v + 1.

One update: advantages of all rows -> training masks -> optimizer steps (`steps`).
"""

from __future__ import annotations

import hashlib
import logging
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
from tasks.training.algorithms import Algorithms
from tasks.training.checkpoint import LearnerCounters, restore_checkpoint, save_checkpoint
from tasks.training.config import TrainingConfig
from tasks.training.critic import CRITIC_FILE, Critic, read_critic
from tasks.training.forward import PolicyForward
from tasks.training.lora import adapter_entry, adapter_files, adapter_tensors, add_adapter, merged_tensors
from tasks.training.metrics import batch_metrics
from tasks.training.model import load_policy, policy_tensors
from tasks.training.normalisers import build_normaliser
from tasks.training.objective import Objective
from tasks.training.optimizer import build_optimizer
from tasks.training.packing import MicroBatch
from tasks.training.prepared import PreparedRows, TrainableRows, prepare_rows
from tasks.training.ranks import OneRank, Ranks
from tasks.training.reference import AdapterOff, FrozenCopy, Reference
from tasks.training.row import TrainingRow
from tasks.training.schedule import learning_rate_at
from tasks.training.sharding import shard, whole
from tasks.training.steps import StepsReport, UpdateSteps
from tasks.training.streamed import StreamedUpdate
from tasks.training.streamed_steps import StreamedSteps
from tasks.training.token_reads import read_sampled_tokens

logger = logging.getLogger(__name__)


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
        self._streamed: StreamedUpdate | None = None
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
        self._check_next(version)
        started = time.perf_counter()
        self._check_rows(rows, version)
        streamed = self._take_streamed(rows, version, max_staleness)
        before = None if streamed is None else streamed.done()
        if streamed is None:
            prepared = self._prepare(rows, version, max_staleness)
        else:
            prepared = streamed.completed(rows)
        families = num_families or len(prepared.families)
        metrics = batch_metrics(prepared.rows, prepared.advantages, prepared.masks, version)
        trainable = prepared.trainable(families)
        notes: list[str] = []
        skipped = None
        steps_taken = 0
        if trainable.sequences:
            metrics["learning_rate"] = self._set_learning_rate(version)
            report = self._take_steps(trainable, version, streamed)
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
                f"(sampled tokens masked by cause: {prepared.masks.masked_tokens or 'none was sampled'})"
            )
            notes.append(skipped)
        self.version = version + 1
        update_s = time.perf_counter() - started
        if before is not None:
            metrics |= before
            update_s += before["time/streamed_s"]
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

    def stream(self, rows: Sequence[TrainingRow], version: int, *, max_staleness: int | None = None) -> None:
        """Begin, or go on with, update ``version``: whole groups of its batch, before the batch is whole.

        No weight changes. `update` then takes the batch, of which these rows are not computed again; should the batch
        not hold a group as it was given here, all that was streamed is forgotten. Groups may come in any order. An
        error forgets what was streamed as well.

        Raises:
            ValueError: a row that cannot be trained on, a group that was given before, or not the next update.
        """
        assert self.config.streamed, "training.streamed is set"
        self._check_next(version)
        try:
            self._check_rows(rows, version)
            if self._streamed is None:
                self._streamed = StreamedUpdate(
                    version,
                    max_staleness,
                    lambda rows: self._prepare(rows, version, max_staleness),
                    StreamedSteps(**self._for_steps()),
                )
            self._streamed.add(rows)
        except BaseException:
            self._streamed = None
            raise

    @property
    def num_streamed_groups(self) -> int:
        """Groups of the next update that were streamed."""
        return 0 if self._streamed is None else len(self._streamed.groups)

    def _check_next(self, version: int) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the learner's weights are unknown ({self._failure}); restore a checkpoint first")
        if version != self.version:
            raise ValueError(
                f"the learner holds version {self.version}; batch {version} is not the next one to train on"
            )

    def _check_rows(self, rows: Sequence[TrainingRow], version: int) -> None:
        for row in rows:
            row.validate(version=version, vocabulary_size=self._vocabulary_size)
        self._agree(rows, version)

    def _prepare(self, rows: Sequence[TrainingRow], version: int, max_staleness: int | None) -> PreparedRows:
        reference, critic = self._reference, self._critic
        return prepare_rows(
            rows,
            version,
            max_staleness,
            self.config.truncated_rows,
            self.algorithms,
            values_RT=None if critic is None else self._read_values(rows, critic),
            reference_RT=None if reference is None else self._read_sampled(rows, reference.logprobs),
        )

    def _take_streamed(
        self, rows: Sequence[TrainingRow], version: int, max_staleness: int | None
    ) -> StreamedUpdate | None:
        """What was streamed of the batch, if it is the batch's."""
        streamed, self._streamed = self._streamed, None
        if streamed is None or streamed.is_part_of(rows, max_staleness):
            return streamed
        logger.warning("update %d: the batch is not what was streamed of it; starting over", version)
        return None

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
        self._failure = self._streamed = None

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
        if directory is not None and not Path(directory).is_dir():
            raise ValueError(
                f"training.reference.model_directory is {directory!r}, and there is no such folder where the learner "
                "runs; give the folder of a model, or leave it out for the policy that the run starts from"
            )
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

    def _for_steps(self) -> dict[str, Any]:
        return {
            "forward": self._forward,
            "loss": self._loss,
            "normalise": self._normalise,
            "optimizer": self._optimizer,
            "config": self.config,
            "device": self.device,
            "critic": self._critic,
            "ranks": self.ranks,
        }

    def _take_steps(self, rows: TrainableRows, version: int, streamed: StreamedUpdate | None) -> StepsReport:
        try:
            if streamed is not None:
                return streamed.steps.finish(rows.num_families, version)
            return UpdateSteps(rows, **self._for_steps()).run(version=version, seed=self.seed)
        except BaseException as error:
            # Some steps may have been taken and others not: such weights are no version.
            self._failure = f"update {version} failed: {type(error).__name__}: {error}"
            raise
