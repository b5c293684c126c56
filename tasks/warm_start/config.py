"""How the warm start is trained: behaviour cloning of noisy scripted experts, so that RL does not start from zero."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator


class WarmStartConfig(BaseModel):
    """Short supervised training on episodes that a noisy expert plays; its loss is on action tokens only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    num_steps: int = Field(default=300, ge=1)
    """Optimizer steps. Many steps of few episodes teach copying sooner than few steps of many."""
    episodes_per_step: dict[str, int] = Field(
        default_factory=lambda: {"frozen_lake": 3, "guess_number": 4, "calculator": 10, "code_repair": 6}
    )
    """Fresh episodes of each step, by family name. 0 leaves a family out."""
    default_episodes_per_step: int = Field(default=4, ge=0)
    """For families that ``episodes_per_step`` does not name. Set it to 0 for families without a scripted expert."""
    p_random: dict[str, float] = Field(
        default_factory=lambda: {"frozen_lake": 0.5, "guess_number": 0.6, "calculator": 0.2, "code_repair": 0.5}
    )
    """Probability that an action is a random valid one instead of the expert's, by family name: what is left for RL.
    Low for the calculator, whose actions are copied digit by digit: a policy that takes some of them for random ones
    may leave the expression at every digit."""
    default_p_random: float = Field(default=0.5, ge=0, le=1)
    """For families that ``p_random`` does not name."""
    learning_rate: float = Field(default=1.5e-3, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of matrices."""
    warmup_steps: int = Field(default=20, ge=0)
    """The learning rate rises linearly over this many steps."""
    decay_fraction: float = Field(default=0.25, ge=0, le=1)
    """It falls linearly to 0 over this last part of the steps."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global 2-norm."""
    max_tokens_per_microbatch: int = Field(default=2560, ge=1)
    """Tokens that go through the model at once."""

    @field_validator("episodes_per_step")
    @classmethod
    def _counts_are_counts(cls, value: dict[str, int]) -> dict[str, int]:
        if wrong := {family: count for family, count in value.items() if count < 0}:
            raise ValueError(f"warm_start.episodes_per_step holds {wrong}; counts are 0 or more")
        return value

    @field_validator("p_random")
    @classmethod
    def _probabilities_are_probabilities(cls, value: dict[str, float]) -> dict[str, float]:
        if wrong := {family: p for family, p in value.items() if not 0.0 <= p <= 1.0}:
            raise ValueError(f"warm_start.p_random holds {wrong}; probabilities lie from 0 to 1")
        return value

    def episodes_of(self, family: str) -> int:
        """Episodes of a family in each step."""
        return self.episodes_per_step.get(family, self.default_episodes_per_step)

    def noise_of(self, family: str) -> float:
        """Probability of a random action in a family."""
        return self.p_random.get(family, self.default_p_random)
