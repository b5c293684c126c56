"""The learner: turns policy version v and the rows of batch v into version v + 1.

One update: advantages and training masks of all rows (`prepared`) -> optimizer steps (`steps`). What they change, and
the forms in which it is saved and published: `learned_state`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from resources.object_store import ObjectStore
from resources.weights.manifest import AdapterEntry
from tasks.training.algorithms import Algorithms
from tasks.training.checkpoint import LearnerCounters
from tasks.training.config import TrainingConfig
from tasks.training.learned_state import LearnedState
from tasks.training.metrics import batch_metrics
from tasks.training.normalisers import build_normaliser
from tasks.training.objective import Objective
from tasks.training.optimizer import set_learning_rate
from tasks.training.passes import UpdateParts
from tasks.training.prepared import PreparedRows, TrainableRows, prepare_rows
from tasks.training.ranks import OneRank, Ranks, check_same_batch
from tasks.training.reference import build_reference
from tasks.training.row import TrainingRow
from tasks.training.schedule import learning_rate_at
from tasks.training.steps import StepsReport, UpdateSteps
from tasks.training.streamed import StreamedUpdate
from tasks.training.streamed_steps import StreamedSteps
from tasks.training.token_reads import read_sampled_tokens
from tasks.training.update_report import UpdateReport

logger = logging.getLogger(__name__)


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
        self.version = 0
        self.optimizer_step = 0
        self.skipped_updates = 0
        self.skipped_steps = 0
        self._failure: str | None = None
        self._streamed: StreamedUpdate | None = None
        self.algorithms = Algorithms(config)
        self._loss = Objective(self.algorithms)
        self._state = LearnedState(model_directory, config, seed=seed, device=device, ranks=self.ranks)
        self.model, self.base = self._state.model, self._state.base
        self._forward, self._optimizer, self._critic = self._state.forward, self._state.optimizer, self._state.critic
        self._parts = UpdateParts(
            self._forward,
            self._loss,
            build_normaliser(config),
            self._optimizer,
            config,
            device,
            self._critic,
            self.ranks,
        )
        self._vocabulary_size = int(self.model.config.get_text_config().vocab_size)
        self._reference = None
        if self._loss.needs_reference:
            self._reference = build_reference(self._forward, model_directory, config, device=device, ranks=self.ranks)

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
        prepared = self._prepare(rows, version, max_staleness) if streamed is None else streamed.completed(rows)
        metrics = batch_metrics(prepared.rows, prepared.advantages, prepared.masks, version)
        trainable = prepared.trainable(num_families or len(prepared.families))
        notes: list[str] = []
        skipped = None
        steps_taken = 0
        if trainable.sequences:
            metrics["learning_rate"] = learning_rate_at(version, self.config.optimizer, self.total_updates)
            set_learning_rate(self._optimizer, metrics["learning_rate"])
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
            num_rollouts = len({row.rollout_id for row in rows})
            skipped = (
                f"update {version} took no step and changed no weight: {num_rollouts} trajectories hold no token to "
                f"train (sampled tokens masked by cause: {prepared.masks.masked_tokens or 'none was sampled'})"
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
                    partial(self._prepare, version=version, max_staleness=max_staleness),
                    StreamedSteps(self._parts),
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
        check_same_batch(self.ranks, rows, version)

    def _prepare(self, rows: Sequence[TrainingRow], version: int, max_staleness: int | None) -> PreparedRows:
        reference, critic, forward = self._reference, self._critic, self._forward
        read = partial(read_sampled_tokens, rows, config=self.config, device=self.device, ranks=self.ranks)
        return prepare_rows(
            rows,
            version,
            max_staleness,
            self.config.truncated_rows,
            self.algorithms,
            values_RT=None if critic is None else read(lambda batch: critic.values(forward.tokens(batch).hidden_ND)),
            reference_RT=None if reference is None else read(reference.logprobs),
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
        return self._state.adapter

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of what a version holds (`LearnedState.tensors`); nothing on ranks other than the first."""
        return self._state.tensors()

    def files(self, base: str | None = None) -> dict[str, bytes]:
        """What makes a version loadable, by itself or beside its ``base`` (`LearnedState.files`)."""
        return self._state.files(base)

    def save(self, store: ObjectStore, prefix: str) -> None:
        """Write a checkpoint under ``prefix``; complete once ``state.json`` lies there."""
        counters = LearnerCounters(
            self.seed, self.version, self.optimizer_step, self.skipped_updates, self.skipped_steps
        )
        self._state.save(store, prefix, counters)

    def restore(self, store: ObjectStore, prefix: str) -> None:
        """Go on from a checkpoint: the next update is bitwise the one that would have followed it.

        Raises:
            KeyError: there is no complete checkpoint.
            ValueError: it is damaged, of another model, or of a run with another seed (nothing has changed then).
        """
        counters = self._state.restore(store, prefix)
        self.version = counters.version
        self.optimizer_step = counters.optimizer_step
        self.skipped_updates = counters.skipped_updates
        self.skipped_steps = counters.skipped_steps
        self._failure = self._streamed = None

    def _take_steps(self, rows: TrainableRows, version: int, streamed: StreamedUpdate | None) -> StepsReport:
        try:
            if streamed is not None:
                return streamed.steps.finish(rows.num_families, version)
            return UpdateSteps(rows, self._parts).run(version=version, seed=self.seed)
        except BaseException as error:
            # Some steps may have been taken and others not: such weights are no version.
            self._failure = f"update {version} failed: {type(error).__name__}: {error}"
            raise
