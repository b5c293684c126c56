"""The weights of one version, fused for the forward pass of `local_forward`.

What is folded in, so that a step runs few and large operations (the results are those of the unfused model up to
rounding):
- the weight of each RMS norm, and the square root of its width, into the matrix that follows it;
- q, k, v into one matrix, gate and up into another, both stored [in, out];
- the softmax scale into the query columns, or into the query norm;
- the order of each head's channels: rotary pairs (i, i + D/2) lie side by side, so that a rotation is one complex
  product. Queries and keys are permuted alike, which leaves their products as they are.

Shapes: E hidden size, H heads, K key-value heads, D head size, I feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from resources.engines.local_layout import ModelLayout


class WeightSource(Protocol):
    """Where an engine finds published versions (`resources.weights.store.WeightStore` is one)."""

    def fetch(self, version: int) -> Mapping[str, torch.Tensor]:
        """The policy's tensors by their Hugging Face names, verified; an adapter merged into its base. Blocks."""
        ...

    def num_bytes(self, version: int) -> int:
        """Of the version's tensors as published. Blocks."""
        ...

    def policy_directory(self, version: int) -> object:
        """Path of a directory with the version's ``config.json``. Blocks."""
        ...


@dataclass(frozen=True)
class LayerWeights:
    qkv: torch.Tensor
    """[E, (H + 2K) D]"""
    qkv_bias: torch.Tensor | None
    qk_scale: torch.Tensor | None
    """[H + K, D]: weight of the query and key norms."""
    output: torch.Tensor
    """[H D, E]"""
    output_bias: torch.Tensor | None
    gate_up: torch.Tensor
    """[E, 2I]"""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    """[I, E]"""
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class FusedWeights:
    version: int
    embedding: torch.Tensor
    """[V, E]"""
    layers: tuple[LayerWeights, ...]
    head: torch.Tensor
    """[E, V]"""


def fuse_weights(
    layout: ModelLayout, tensors: Mapping[str, torch.Tensor], version: int, device: str = "cpu"
) -> FusedWeights:
    """Fuse the tensors of one version.

    Raises ValueError when a name or shape does not match the layout, or when the head of a tied model is another matrix
    than its embedding: such weights would be half of one version and half of another.
    """
    _check_names(layout, tensors, version)
    # Cloned: as fetched it may be a view of a mapped file.
    embedding = _matrix(tensors, "model.embed_tokens.weight", (layout.vocab_size, layout.hidden_size), device).clone()
    if layout.tied_head:
        head = tensors.get("lm_head.weight")
        if head is not None and not torch.equal(head, tensors["model.embed_tokens.weight"]):
            raise ValueError(
                f"weights of version {version}: lm_head.weight differs from model.embed_tokens.weight, but the model's "
                "head is tied (tie_word_embeddings); publish one matrix"
            )
        unfolded_head = embedding
    else:
        unfolded_head = _matrix(tensors, "lm_head.weight", (layout.vocab_size, layout.hidden_size), device)
    final_norm = _matrix(tensors, "model.norm.weight", (layout.hidden_size,), device)
    return FusedWeights(
        version=version,
        embedding=embedding,
        layers=tuple(
            _fuse_layer(layout, tensors, f"model.layers.{layer}", device) for layer in range(layout.num_layers)
        ),
        head=_fold_norm(unfolded_head, final_norm),
    )


def _fuse_layer(layout: ModelLayout, tensors: Mapping[str, torch.Tensor], prefix: str, device: str) -> LayerWeights:
    hidden, head_dim = layout.hidden_size, layout.head_dim
    q_size, kv_size = layout.num_heads * head_dim, layout.num_kv_heads * head_dim
    # Channel order in which rotary pairs lie side by side: 0, D/2, 1, D/2 + 1, ...
    pairs = torch.arange(head_dim, device=device).view(2, head_dim // 2).t().flatten()
    softmax_scale = head_dim**-0.5

    def get(name: str, *shape: int) -> torch.Tensor:
        return _matrix(tensors, f"{prefix}.{name}", shape, device)

    def by_pairs(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(-1, head_dim, *rows.shape[1:])[:, pairs].reshape(rows.shape)

    q = by_pairs(get("self_attn.q_proj.weight", q_size, hidden))
    k = by_pairs(get("self_attn.k_proj.weight", kv_size, hidden))
    v = get("self_attn.v_proj.weight", kv_size, hidden)
    bias_q = bias_k = bias_v = None
    if layout.qkv_bias:
        bias_q = by_pairs(get("self_attn.q_proj.bias", q_size))
        bias_k = by_pairs(get("self_attn.k_proj.bias", kv_size))
        bias_v = get("self_attn.v_proj.bias", kv_size)
    qk_scale = None
    if layout.qk_norm:
        # A normalised head has length sqrt(D): the square root and the softmax scale cancel for queries.
        q_norm = get("self_attn.q_norm.weight", head_dim)[pairs]
        k_norm = get("self_attn.k_norm.weight", head_dim)[pairs] * head_dim**0.5
        qk_scale = torch.cat([q_norm.expand(layout.num_heads, -1), k_norm.expand(layout.num_kv_heads, -1)])
    else:
        q = q * softmax_scale
        bias_q = None if bias_q is None else bias_q * softmax_scale
    input_norm = get("input_layernorm.weight", hidden)
    post_norm = get("post_attention_layernorm.weight", hidden)
    width = layout.intermediate_size
    gate_up = torch.cat([get("mlp.gate_proj.weight", width, hidden), get("mlp.up_proj.weight", width, hidden)])
    return LayerWeights(
        qkv=_fold_norm(torch.cat([q, k, v]), input_norm),
        qkv_bias=None if bias_q is None or bias_k is None or bias_v is None else torch.cat([bias_q, bias_k, bias_v]),
        qk_scale=qk_scale,
        output=get("self_attn.o_proj.weight", hidden, q_size).t().contiguous(),
        output_bias=get("self_attn.o_proj.bias", hidden) if layout.output_bias else None,
        gate_up=_fold_norm(gate_up, post_norm),
        gate_up_bias=(
            torch.cat([get("mlp.gate_proj.bias", width), get("mlp.up_proj.bias", width)]) if layout.mlp_bias else None
        ),
        down=get("mlp.down_proj.weight", hidden, width).t().contiguous(),
        down_bias=get("mlp.down_proj.bias", hidden) if layout.mlp_bias else None,
    )


def _fold_norm(matrix: torch.Tensor, norm_weight: torch.Tensor) -> torch.Tensor:
    """[out, in] and the weight of the norm before it -> [in, out] for inputs of length 1."""
    return (matrix * norm_weight * norm_weight.numel() ** 0.5).t().contiguous()


def _matrix(tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise ValueError(f"weights: {name} has shape {tuple(tensor.shape)}, the model's config.json means {shape}")
    return tensor.detach().to(device=device, dtype=torch.float32)


def _check_names(layout: ModelLayout, tensors: Mapping[str, torch.Tensor], version: int) -> None:
    expected = layout.tensor_names()
    missing = sorted(expected - set(tensors))
    unmatched = sorted(set(tensors) - expected - {"lm_head.weight"})
    if missing or unmatched:
        raise ValueError(
            f"weights of version {version} do not fit the model: missing {missing[:5]} ({len(missing)} in all), "
            f"unmatched {unmatched[:5]} ({len(unmatched)} in all)"
        )
