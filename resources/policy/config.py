"""What the policy is: a model directory, or the tiny policy that is created when none is named."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class PolicyConfig(BaseModel):
    """The policy LM. With ``model_directory`` the other fields, apart from ``context_length``, are not used."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    model_directory: str | None = None
    """Hugging Face directory of a Qwen3, Qwen2 or Llama causal LM with a tokenizer that has a chat template. A relative
    path is made absolute where the configuration is read. None: create a tiny untrained policy of the sizes below."""
    context_length: int = Field(default=512, ge=16)
    """Tokens of one trajectory, at most: prompt, observations and actions together."""
    hidden_size: int = Field(default=128, ge=8)
    """Width of the tiny policy."""
    num_layers: int = Field(default=3, ge=1)
    num_heads: int = Field(default=4, ge=1)
    """Query heads; the head width is ``hidden_size / num_heads`` and must be even (rotary embedding)."""
    num_kv_heads: int = Field(default=2, ge=1)
    """Key-value heads; must divide ``num_heads``."""
    intermediate_size: int = Field(default=320, ge=8)
    """Width of the gated feed-forward."""
    vocab_size: int = Field(default=512, ge=288, le=65536)
    """Upper bound of the tiny policy's vocabulary. 256 bytes and the special tokens are always in it; the rest are the
    words that save most tokens in environment text."""
    min_word_frequency: int = Field(default=10, ge=1)
    """A word must occur this often in that text to become a token."""

    @field_validator("model_directory")
    @classmethod
    def _make_absolute(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.strip():
            raise ValueError("policy.model_directory is empty; give a path, or leave the key out")
        return str(Path(value).expanduser().absolute())

    @model_validator(mode="after")
    def _heads_fit(self) -> PolicyConfig:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"policy.hidden_size is {self.hidden_size} and policy.num_heads is {self.num_heads}; the head width "
                "hidden_size / num_heads must be an even integer"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"policy.num_kv_heads is {self.num_kv_heads}; it must divide policy.num_heads ({self.num_heads})"
            )
        return self
