"""Which algorithm: advantage estimator, loss, off-policy corrections, KL, critic; for the run, or for one family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tasks.training.plugins import CORRECTIONS, ESTIMATORS, LOSSES, check_name

WeightLevel = Literal["token", "sequence_sum", "sequence_mean"]
"""One weight per token, or one per sequence: from the sum of its tokens' log-ratios (the exact importance weight; it
leaves 1 quickly on long sequences), or from their mean (the geometric mean per token)."""

WEIGHT_BOUNDS: Mapping[str, tuple[float, float]] = {
    "truncated_weight": (0.0, 2.0),
    "masked_weight": (0.5, 5.0),
    "ratio_mask": (0.5, 5.0),
}
"""Lower and upper bound of each correction's weight, where the configuration names none."""


class AdvantageConfig(BaseModel):
    """Which advantage estimator turns rewards into advantages."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    estimator: str = "grpo"
    """``grpo``, ``rloo``, ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``gdpo``, ``turn_returns``,
    ``gigpo``, ``gae`` (needs ``training.critic``), or an import path ``package.module:Class`` (built with this object
    as its only argument). See docs/algorithms.md."""
    scaling: Literal["group", "batch", "none"] = "group"
    """What a centred reward is divided by. ``group``: the group's standard deviation (ddof 0) plus ``epsilon``.
    ``batch``: that of all scored rollouts of the families which share this section (``grpo`` only). ``none``: nothing
    (Dr. GRPO). Read by ``grpo``, ``turn_returns`` and ``gigpo``."""
    normalisation: Literal["none", "batch", "family"] = "none"
    """Afterwards, over the advantages of the trained tokens: mean 0 and standard deviation 1 over all families that
    share this section (``batch``), or within each family (``family``: task advantage normalisation)."""
    epsilon: float = Field(default=1e-4, ge=0)
    """Added to the standard deviation of ``scaling``, in units of reward."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Of rewards, per turn in ``turn_returns`` and ``gigpo``, per sampled token in ``gae``."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """``gae`` only: 0 trusts the critic after one token, 1 trusts the rewards alone."""
    step_weight: float = Field(default=1.0, ge=0)
    """``gigpo`` only: weight of the advantage among turns that saw the same observation, beside the episode's."""
    component_weights: dict[str, float] = Field(default_factory=dict)
    """``gdpo`` only: weight of each reward component, by name. Empty: every component of the rows, weight 1. One
    that a rollout does not name is 0 there."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Whatever an estimator of your own needs; built-in estimators take none."""

    @field_validator("estimator")
    @classmethod
    def _estimator_is_known(cls, value: str) -> str:
        return check_name("training.advantage.estimator", value, ESTIMATORS)


class LossConfig(BaseModel):
    """Which token loss is minimised."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    name: str = "ppo_clip"
    """``ppo_clip``: ratio of current to behaviour policy, clipped. ``decoupled``: ratio of current to proximal policy
    (the learner when the update starts), clipped, times a truncated weight proximal / behaviour. Others:
    ``policy_gradient``, ``gspo``, ``cispo``, ``tis``, ``topr``, ``kimi``, or an import path ``package.module:Class``
    (built with this object as its only argument). See docs/algorithms.md."""
    ratio_to: Literal["behaviour", "proximal"] = "behaviour"
    """What the current policy is compared with in the loss's ratio: the engine that sampled, or the learner when the
    update starts (``decoupled`` always takes the latter)."""
    proximal: Literal["recomputed", "loglinear"] = "recomputed"
    """Where proximal log-probabilities come from: a forward pass before the first step, or, without one, between
    behaviour and current in proportion to the versions passed."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """Ratios below 1 - clip_low are clipped. None: the loss's own (0.2; ``gspo`` 3e-4; ``cispo`` and ``tis`` 1, that is
    no lower bound)."""
    clip_high: float | None = Field(default=None, ge=0)
    """Ratios above 1 + clip_high are clipped. None: the loss's own (0.28; ``gspo`` 4e-4; ``tis`` and ``topr`` 0)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """``ppo_clip``, ``decoupled`` and ``gspo``: with a negative advantage the ratio counts at most this much (dual
    clip). None: no such bound."""
    behaviour_weight_cap: float = Field(default=2.0, gt=0)
    """``decoupled`` only: the weight proximal / behaviour is truncated to at most this."""
    behaviour_weight_level: WeightLevel = "token"
    """``decoupled`` and ``topr``: one weight per token, or one per sequence from the sum, or from the mean, of its
    tokens' log-ratios (``sequence_sum`` is the exact importance weight; it leaves 1 quickly on long sequences)."""
    positive_above: float = 0.0
    """``topr`` only: a trajectory whose reward exceeds this is imitated without a weight."""
    quadratic_penalty: float = Field(default=0.1, ge=0)
    """``kimi`` only: tau, the weight of the squared log-ratio."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Entropy bonus: this times the entropy at each trained token is taken from the loss."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Whatever a loss of your own needs; built-in losses take none."""

    @field_validator("name")
    @classmethod
    def _loss_is_known(cls, value: str) -> str:
        return check_name("training.loss.name", value, LOSSES)

    @property
    def reads_behaviour(self) -> bool:
        """Whether the loss compares the current policy with the one that sampled a token; a loss of your own is taken
        to."""
        if self.name == "decoupled" or ":" in self.name:
            return True
        return self.name != "policy_gradient" and self.ratio_to == "behaviour"

    def clip_bounds(self, low: float, high: float) -> tuple[float, float]:
        """(lowest, highest) ratio that is not clipped; ``low`` and ``high`` are the loss's own where nothing is
        given."""
        return (
            1.0 - (low if self.clip_low is None else self.clip_low),
            1.0 + (high if self.clip_high is None else self.clip_high),
        )


class KLConfig(BaseModel):
    """Penalty for leaving the reference policy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the penalty; 0: none, and no reference is needed."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log policy - log reference: ``k1`` d, ``k2`` d^2 / 2, ``k3`` exp(-d) - 1 + d. The one whose mean
    gradient is that of KL(policy || reference) is ``k2`` in the loss and ``k1`` in the reward. In the loss ``k3`` has
    that of KL(reference || policy), and ``k1`` 0 whatever the reference is (see docs/algorithms.md)."""
    place: Literal["loss", "reward"] = "loss"
    """``loss``: added to each token's loss, with the current policy and a gradient. ``reward``: taken from the rewards,
    with the behaviour policy (the one that sampled), before advantages are estimated."""


class CorrectionConfig(BaseModel):
    """One off-policy correction: a weight, or a mask, on trained tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    name: str
    """``truncated_weight``, ``masked_weight``, ``ratio_mask``, ``staleness_mask``, ``m2po``, or an import path
    ``package.module:Class`` (built with this object as its only argument). See docs/algorithms.md."""
    level: WeightLevel = "token"
    """One weight per token, or one per sequence from the sum, or the mean (geometric), of its tokens' log-ratios."""
    low: float | None = Field(default=None, ge=0)
    """Lower bound of the weight. None: the correction's own (0; ``masked_weight`` and ``ratio_mask`` 0.5)."""
    high: float | None = Field(default=None, gt=0)
    """Upper bound of the weight. None: the correction's own (2; ``masked_weight`` and ``ratio_mask`` 5)."""
    max_staleness: int = Field(default=0, ge=0)
    """``staleness_mask`` only: tokens sampled more versions ago are masked."""
    second_moment: float = Field(default=0.04, gt=0)
    """``m2po`` only: bound on the mean squared log-ratio of the tokens that stay."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Whatever a correction of your own needs; built-in ones take none."""

    @field_validator("name")
    @classmethod
    def _correction_is_known(cls, value: str) -> str:
        return check_name("training.corrections.name", value, CORRECTIONS)

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> CorrectionConfig:
        low, high = self.bounds(*WEIGHT_BOUNDS.get(self.name, (0.0, math.inf)))
        if low >= high:
            raise ValueError(
                f"training.corrections: {self.name} has low {low} and high {high}; low must be below high"
                + (", and what is not given is the correction's own" if None in (self.low, self.high) else "")
            )
        return self

    def bounds(self, low: float, high: float) -> tuple[float, float]:
        """(low, high), or the correction's own where they are not given."""
        return low if self.low is None else self.low, high if self.high is None else self.high


class CriticConfig(BaseModel):
    """A value head on the decoder's hidden states, for ``gae``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    learning_rate: float = Field(default=1e-3, gt=0)
    """Of the head's own AdamW; constant."""
    value_clip: float = Field(default=0.2, gt=0)
    """A value may move this far from the one with which the update started before the loss stops rewarding it."""
    coefficient: float = Field(default=0.5, gt=0)
    """Weight of the value loss beside the policy's, as far as it reaches the decoder (``train_decoder``)."""
    train_decoder: bool = False
    """Whether the value loss also changes the decoder that the policy shares; otherwise the head alone."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The head's gradients are scaled down to this 2-norm."""


class FamilyTrainingConfig(BaseModel):
    """What one task family does otherwise than the run. A section that is given replaces the run's as a whole."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    advantage: AdvantageConfig | None = None
    """None: ``training.advantage``."""
    loss: LossConfig | None = None
    """None: ``training.loss``."""
    corrections: tuple[CorrectionConfig, ...] | None = None
    """None: ``training.corrections``."""
    kl: KLConfig | None = None
    """None: ``training.kl``."""
    weight: float = Field(default=1.0, gt=0)
    """The family's share of the loss is multiplied by this."""


class AlgorithmSections(NamedTuple):
    """What the algorithm of a family consists of: its own sections, the run's where it has none."""

    advantage: AdvantageConfig
    loss: LossConfig
    corrections: tuple[CorrectionConfig, ...]
    kl: KLConfig

    @property
    def may_need_reference(self) -> bool:
        """Whether a KL term, or a class of one's own, may ask for the reference policy."""
        return self.kl.coefficient > 0 or ":" in self.loss.name or ":" in self.advantage.estimator
