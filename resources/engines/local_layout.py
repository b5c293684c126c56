"""What shape has this model? Read from a Hugging Face directory; whatever the forward pass could not do is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resources.policy.directory import read_model_config

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelLayout:
    """A decoder of the Llama family: Llama, Qwen2 or Qwen3."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    tied_head: bool
    """The output head is the embedding matrix."""
    qk_norm: bool
    """RMS norm of each query and key head (Qwen3)."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    max_positions: int
    inverse_frequencies: tuple[float, ...]
    """[head_dim / 2], of the rotary embedding, scaling included."""
    rotary_scale: float
    """Factor on cosines and sines (yarn; 1 otherwise)."""

    @property
    def num_parameters(self) -> int:
        """Of the matrices that every token passes through, the head included: two FLOPs each per token."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return (
            self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)
            + self.vocab_size * self.hidden_size
        )

    def tensor_names(self) -> set[str]:
        """Names that a version must have, apart from ``lm_head.weight`` of a tied head, which it may have."""
        modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
        modules += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        modules += ["input_layernorm", "post_attention_layernorm"]
        parts = [f"{module}.weight" for module in modules]
        if self.qk_norm:
            parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        if self.qkv_bias:
            parts += [f"self_attn.{name}_proj.bias" for name in "qkv"]
        if self.output_bias:
            parts += ["self_attn.o_proj.bias"]
        if self.mlp_bias:
            parts += [f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")]
        names = {f"model.layers.{layer}.{part}" for layer in range(self.num_layers) for part in parts}
        return (
            names
            | {"model.embed_tokens.weight", "model.norm.weight"}
            | (set() if self.tied_head else {"lm_head.weight"})
        )


def read_layout(directory: str | Path) -> ModelLayout:
    """Read ``config.json``. Raises ValueError, naming directory and setting, for what the local engine cannot run."""
    from transformers import AutoConfig

    architecture = read_model_config(directory)["architectures"][0]
    config: Any = AutoConfig.from_pretrained(directory, local_files_only=True)

    def refuse(setting: str, value: object, allowed: str) -> None:
        raise ValueError(
            f"model directory {str(directory)!r}: {setting} is {value!r}; the local engine runs {allowed} only; "
            "choose another model or another engine.backend"
        )

    if config.hidden_act != "silu":
        refuse("hidden_act", config.hidden_act, "'silu'")
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type != "full_attention":
            refuse("layer_types", layer_type, "'full_attention' (use_sliding_window: false)")
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in STATIC_ROPE_TYPES:
        refuse("rope_parameters.rope_type", rope_type, ", ".join(map(repr, STATIC_ROPE_TYPES)))
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("rope_parameters.partial_rotary_factor", config.rope_parameters["partial_rotary_factor"], "1.0")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies, rotary_scale = _rotary_frequencies(config, rope_type, head_dim)
    attention_bias = bool(getattr(config, "attention_bias", False))
    return ModelLayout(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        tied_head=bool(config.tie_word_embeddings),
        qk_norm=architecture == "Qwen3ForCausalLM",
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(getattr(config, "mlp_bias", False)) and architecture == "LlamaForCausalLM",
        max_positions=config.max_position_embeddings,
        inverse_frequencies=tuple(frequencies.tolist()),
        rotary_scale=rotary_scale,
    )


def _rotary_frequencies(config: Any, rope_type: str, head_dim: int) -> tuple[torch.Tensor, float]:
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config)
    return frequencies, float(scale)
