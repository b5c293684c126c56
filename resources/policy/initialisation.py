"""The weights with which a tiny policy starts: wide enough to learn copying in a few dozen steps.

What such a policy has to learn first is to repeat tokens that it was shown: operands, results, directions. From the
usual normal distribution of deviation 0.02 that takes longer than a warm start lasts.
"""

from __future__ import annotations

import math

import torch
from transformers import Qwen3ForCausalLM

EMBEDDING_STD = 0.1
"""At a hidden width of 128 the tied head's logits then start with a deviation of about 1."""
RESIDUAL_STD = 0.02
"""Of the feed-forward's output projection: small beside the embedding, so that tokens stay visible through the
layers."""
COPY_GAIN = 0.25
"""How much of what a head attends to it adds to the residual stream."""


def initialise(model: Qwen3ForCausalLM) -> None:
    """Draw all matrices anew from torch's global generator; norms stay at 1.

    Attention starts as copying, as in mimetic initialisation (arXiv 2305.09828): the rows of a layer's value projection
    are orthogonal, and each head's output projection is its transpose, so that a head hands on the token that it looks
    at, and the tied head of the model reads it.
    """
    config = model.config
    head_dim: int = config.head_dim
    num_kv_heads: int = config.num_key_value_heads or config.num_attention_heads
    queries_per_value = config.num_attention_heads // num_kv_heads
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    with torch.no_grad():
        weights["model.embed_tokens.weight"].normal_(0.0, EMBEDDING_STD)
        for layer in range(config.num_hidden_layers):
            attention = f"model.layers.{layer}.self_attn"
            for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"):
                weights[f"model.layers.{layer}.{name}.weight"].normal_(0.0, 1.0 / math.sqrt(3 * config.hidden_size))
            weights[f"model.layers.{layer}.mlp.down_proj.weight"].normal_(0.0, RESIDUAL_STD)
            value, output = weights[f"{attention}.v_proj.weight"], weights[f"{attention}.o_proj.weight"]
            orthonormal, _ = torch.linalg.qr(torch.randn(value.shape[1], value.shape[0]))
            value.copy_(orthonormal.T / math.sqrt(3))
            for head in range(config.num_attention_heads):
                shared = head // queries_per_value
                handed_on = value[shared * head_dim : (shared + 1) * head_dim]
                output[:, head * head_dim : (head + 1) * head_dim] = COPY_GAIN * handed_on.T
