"""How the policy is trained: the algorithm, its denominators, the optimizer, and how the work is cut into pieces."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tasks.training.plugins import ESTIMATORS, LOSSES, NORMALISERS, check_name


class AdvantageConfig(BaseModel):
    """Which advantage estimator turns rewards into advantages."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    estimator: str = "grpo"
    """``grpo``, or an import path ``package.module:Class`` (built with this object as its only argument)."""
    scaling: Literal["group", "none"] = "group"
    """``group``: divide by the group's standard deviation (ddof 0) plus ``epsilon``. ``none``: only subtract the
    mean."""
    epsilon: float = Field(default=1e-4, ge=0)
    """Added to the standard deviation, in units of reward."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Whatever an estimator of your own needs; built-in estimators take none."""

    @field_validator("estimator")
    @classmethod
    def _estimator_is_known(cls, value: str) -> str:
        return check_name("training.advantage.estimator", value, ESTIMATORS)


class LossConfig(BaseModel):
    """Which token loss is minimised."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = "ppo_clip"
    """``ppo_clip``: ratio of current to behaviour policy, clipped. ``decoupled``: ratio of current to proximal policy
    (the learner when the update starts), clipped, times a truncated weight proximal / behaviour. Or an import path
    ``package.module:Class`` (built with this object as its only argument)."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Ratios below 1 - clip_low are clipped."""
    clip_high: float = Field(default=0.28, ge=0)
    """Ratios above 1 + clip_high are clipped."""
    behaviour_weight_cap: float = Field(default=2.0, gt=0)
    """``decoupled`` only: the weight proximal / behaviour is truncated to at most this."""
    behaviour_weight_level: Literal["token", "sequence_sum", "sequence_mean"] = "token"
    """``decoupled`` only: one weight per token, or one per sequence from the sum, or from the mean, of its tokens'
    log-ratios (``sequence_sum`` is the exact importance weight; it leaves 1 quickly on long sequences)."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Whatever a loss of your own needs; built-in losses take none."""

    @field_validator("name")
    @classmethod
    def _loss_is_known(cls, value: str) -> str:
        return check_name("training.loss.name", value, LOSSES)


class OptimizerConfig(BaseModel):
    """AdamW and its learning-rate schedule (by update, not by optimizer step)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

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


class TrainingConfig(BaseModel):
    """One update: advantages, loss, denominators, optimizer steps, micro-batches."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    loss: LossConfig = LossConfig()
    """What is minimised."""
    normaliser: str = "family_token_mean"
    """The denominator, over a whole optimizer step. ``family_token_mean``: trained tokens of the row's family, times
    the number of families (families weigh the same). ``token_mean``: trained tokens. ``sequence_mean``: trained tokens
    of the row, times the number of rows. Or an import path ``package.module:function``."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    minibatches: int = Field(default=4, ge=1)
    """Optimizer steps per epoch: the rows are dealt into this many minibatches, family by family."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rows of an update."""
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

    @field_validator("normaliser")
    @classmethod
    def _normaliser_is_known(cls, value: str) -> str:
        return check_name("training.normaliser", value, NORMALISERS)
