"""How the policy is trained: the algorithm, its denominators, the optimizer, and how the work is cut into pieces."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tasks.training.algorithm_config import (
    AdvantageConfig,
    AlgorithmSections,
    CorrectionConfig,
    CriticConfig,
    FamilyTrainingConfig,
    KLConfig,
    LossConfig,
)
from tasks.training.plugins import NORMALISERS, check_name
from tasks.training.requirements import check_requirements
from tasks.training.simulated_config import SimulatedLearnerConfig


class OptimizerConfig(BaseModel):
    """AdamW and its learning-rate schedule (by update, not by optimizer step)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    learning_rate: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of matrices; vectors (norms, biases) are not decayed."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global 2-norm."""
    warmup_updates: int = Field(default=5, ge=0)
    """The learning rate rises linearly over this many updates."""
    total_updates: int | None = Field(default=None, ge=1)
    """After the warm-up the learning rate falls linearly until this many updates are done. None: the run's number of
    iterations when the learner is told it, otherwise no decay."""
    final_fraction: float = Field(default=0.2, ge=0, le=1)
    """Fraction of ``learning_rate`` that is left at the end of the decay."""

    @field_validator("betas")
    @classmethod
    def _betas_are_rates(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in value):
            raise ValueError(f"training.optimizer.betas is {value}; both must lie in [0, 1)")
        return value


class LoraConfig(BaseModel):
    """Low-rank adapter (LoRA, arXiv 2106.09685): the policy's own weights stay frozen and the adapter is trained.
    Checkpoints hold the adapter alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    rank: int = Field(default=16, ge=1)
    """Width of the adapter's matrices."""
    alpha: int = Field(default=32, ge=1)
    """The adapter's product is scaled by ``alpha / rank``."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get an adapter, by the last part of their name."""
    publish: Literal["adapter", "merged"] = "adapter"
    """What a version holds. ``adapter``: the adapter alone, in PEFT's layout; the base is kept once a run beside the
    versions, and engines merge the two. ``merged``: the whole policy, for readers that do not know PEFT."""

    @property
    def scaling(self) -> float:
        """Of the adapter's product."""
        return self.alpha / self.rank

    @field_validator("targets")
    @classmethod
    def _targets_are_named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("training.lora.targets is empty, so nothing would be trained; name at least one layer")
        return value


class ReferenceConfig(BaseModel):
    """The frozen policy that a KL term holds the current one close to. Only a loss that asks for it computes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    model_directory: str | None = None
    """Hugging Face directory of the reference, with the policy's vocabulary. None: the policy that the run started
    from; with ``training.lora`` that is the policy with its adapter off, otherwise a frozen second copy in memory."""

    @field_validator("model_directory")
    @classmethod
    def _make_absolute(cls, value: str | None) -> str | None:
        return None if value is None else str(Path(value).expanduser().absolute())


class TrainingConfig(BaseModel):
    """One update: advantages, loss, denominators, optimizer steps, micro-batches."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    backend: Literal["torch", "simulated"] = "torch"
    """``torch``: the policy is trained. ``simulated``: no model; an update takes the time that its tokens and the
    figures of ``simulated`` imply, and published versions hold nothing. Goes with ``engine.backend: simulated``."""
    simulated: SimulatedLearnerConfig | None = None
    """Figures of a simulated learner; null: the defaults. Only with ``backend: simulated``."""

    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    loss: LossConfig = LossConfig()
    """What is minimised."""
    corrections: tuple[CorrectionConfig, ...] = ()
    """Off-policy corrections of the loss: their weights multiply, whatever masks a token masks it."""
    kl: KLConfig = KLConfig()
    """Penalty for leaving the reference policy."""
    critic: CriticConfig | None = None
    """Value head for ``training.advantage.estimator`` ``gae``. None: there is none."""
    families: dict[str, FamilyTrainingConfig] = Field(default_factory=dict)
    """By task family: what is done otherwise there."""
    normaliser: str = "family_token_mean"
    """The denominator, over a whole optimizer step. ``family_token_mean``: trained tokens of the row's family, times
    the number of families (families weigh the same). ``token_mean``: trained tokens. ``sequence_mean``: trained tokens
    of the row, times the number of rows. ``fixed_length``: ``fixed_length_tokens``, times the number of rows. Or an
    import path ``package.module:function``."""
    fixed_length_tokens: int | None = Field(default=None, ge=1)
    """The constant of ``fixed_length``: the most tokens that a row may sample, say. Required there."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    minibatches: int = Field(default=4, ge=1)
    """Optimizer steps per epoch: the rows are dealt into this many minibatches, family by family."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rows of an update."""
    streamed: bool = False
    """Start the gradients of a batch while it fills, group by group; the step is that of the whole batch. Wants one
    minibatch, one epoch, and an algorithm that looks at groups one by one. See docs/algorithms.md."""
    max_tokens_per_microbatch: int = Field(default=2560, ge=1)
    """Tokens that go through the model at once. A longer row goes alone. Neither loss nor gradient depends on it."""
    max_logits_per_chunk: int = Field(default=2**25, ge=1)
    """Logits (positions x vocabulary) held at once in float32; beyond it the head is computed in chunks and recomputed
    in the backward pass. 2**25 logits are 128 MiB."""
    layout: Literal["packed", "padded"] = "packed"
    """``packed``: rows of a micro-batch lie behind each other, attention is block-diagonal. ``padded``: the model's own
    attention over padded rows, for models whose attention cannot be replaced."""
    truncated_rows: Literal["train", "mask"] = "train"
    """What happens to trajectories that were cut (turn, token or context limit): trained like all others, or masked in
    the loss. Their rewards count in the group's baseline either way."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or a gradient norm that is NaN or infinite: ``stop`` fails the update before the weights change, ``skip``
    drops that optimizer step and counts it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type in which matrix products are computed. Weights, moments, gradients and the softmax are float32 either
    way."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the decoder's layers and compute each layer again in the backward pass: a third more
    work, a fraction of the activations."""
    lora: LoraConfig | None = None
    """Train an adapter instead of the whole policy; null: all weights are trained."""
    reference: ReferenceConfig | None = None
    """Reference policy of losses with a KL term; null: the defaults."""
    ranks: int | None = Field(default=None, ge=1)
    """Learner processes that share an update and its memory, one on each worker of the learner class. null: all its
    workers (``pools.classes.learner.num_workers``). The result does not depend on it."""
    collective_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait of a rank for the others, in seconds; then the update fails."""

    @field_validator("normaliser")
    @classmethod
    def _normaliser_is_known(cls, value: str) -> str:
        return check_name("training.normaliser", value, NORMALISERS)

    @model_validator(mode="after")
    def _simulation_is_wanted(self) -> TrainingConfig:
        if self.simulated is not None and self.backend != "simulated":
            raise ValueError(
                f"training.simulated is given, but training.backend is {self.backend!r}, which would ignore it; set "
                "training.backend to 'simulated', or leave training.simulated out"
            )
        return self

    @property
    def simulation(self) -> SimulatedLearnerConfig:
        """What a simulated learner pretends to be."""
        return self.simulated or SimulatedLearnerConfig()

    @model_validator(mode="after")
    def _algorithms_have_what_they_need(self) -> TrainingConfig:
        check_requirements(self)
        return self

    def algorithms_of(self, families: Collection[str] | None = None) -> dict[str, AlgorithmSections]:
        """By where they are set: the sections that make up each family's algorithm.

        ``families``: of the run; None: not known, so that some may have the run's own.
        """
        of = {
            f"training.families.{name}": AlgorithmSections(
                family.advantage or self.advantage,
                family.loss or self.loss,
                self.corrections if family.corrections is None else family.corrections,
                family.kl or self.kl,
            )
            for name, family in self.families.items()
        }
        if families is None or any(name not in self.families for name in families):
            of = {"training": AlgorithmSections(self.advantage, self.loss, self.corrections, self.kl), **of}
        return of

    def for_families(self, families: Collection[str]) -> TrainingConfig:
        """The same updates of a run with these families, without a section that none of them has."""
        used = self.algorithms_of(families)
        if not used or "training" in used:
            return self
        first = next(iter(used.values()))
        return self.model_copy(
            update={
                "advantage": first.advantage,
                "loss": first.loss,
                "corrections": first.corrections,
                "kl": first.kl,
            }
        )
