"""Attention of packed rows: each token sees the earlier tokens of its own sequence and nothing else.

Everything in a decoder but attention works on one token at a time, so packed rows need no padding there. For attention
the sequences are laid out by length in a few nearly rectangular blocks, which the fused causal kernel takes; a dense
mask over the packed row would cost the square of its length. Legend: H heads, T packed tokens, D head width, B
sequences of a block, L the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from transformers import AttentionInterface, PreTrainedModel

IMPLEMENTATION = "rollart_block_diagonal"
BLOCK_LENGTH_RATIO = 1.25
"""Within one block the longest sequence is at most this much longer than the shortest: padding stays below it."""


@dataclass(frozen=True, slots=True)
class Block:
    num_sequences: int
    length: int
    gather: torch.Tensor
    """int64 [B * L]: packed position of each place; places beyond the end of a sequence repeat its last token."""


@dataclass(frozen=True, slots=True)
class BlockDiagonal:
    """How the sequences of a packed row [T] are spread over blocks, and back."""

    blocks: tuple[Block, ...]
    scatter: torch.Tensor
    """int64 [T]: place of each packed token in the blocks' places, laid one behind the other."""

    @classmethod
    def of_lengths(cls, lengths: np.ndarray, device: str = "cpu") -> BlockDiagonal:
        """Blocks of sequences of similar length, in order; sorted lengths give the fewest blocks."""
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        blocks: list[Block] = []
        scatter: list[np.ndarray] = []
        first = place = 0
        while first < len(lengths):
            end = first + 1
            shortest = longest = int(lengths[first])
            while end < len(lengths):
                shortest, longest = min(shortest, int(lengths[end])), max(longest, int(lengths[end]))
                if longest > BLOCK_LENGTH_RATIO * shortest:
                    break
                end += 1
            chosen = lengths[first:end]
            longest = int(chosen.max())
            within = np.minimum(np.arange(longest), chosen[:, None] - 1)
            gather = (starts[first:end, None] + within).ravel()
            blocks.append(Block(end - first, longest, torch.as_tensor(gather, device=device)))
            scatter.extend(place + i * longest + np.arange(length) for i, length in enumerate(chosen))
            place += (end - first) * longest
            first = end
        return cls(tuple(blocks), torch.as_tensor(np.concatenate(scatter), device=device))


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    block_diagonal: BlockDiagonal,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, KV heads, T, D] -> [1, T, H, D].

    Raises:
        ValueError: when a sliding window is shorter than a sequence (the window would be ignored here).
    """
    longest = max(block.length for block in block_diagonal.blocks)
    if sliding_window is not None and longest > sliding_window:
        raise ValueError(
            f"a row of {longest} tokens is longer than the model's sliding window of {sliding_window}; "
            "set training.layout to 'padded'"
        )
    outputs = []
    for block in block_diagonal.blocks:
        query_BHLD, key_BHLD, value_BHLD = (
            states[0].transpose(0, 1).index_select(0, block.gather).unflatten(0, (block.num_sequences, block.length))
            .transpose(1, 2)
            for states in (query, key, value)
        )  # fmt: skip
        attended = functional.scaled_dot_product_attention(
            query_BHLD,
            key_BHLD,
            value_BHLD,
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    places = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return places.index_select(0, block_diagonal.scatter)[None], None


def use_block_diagonal_attention(model: PreTrainedModel) -> None:
    """Let this model attend through `attend`. It then takes packed rows with ``block_diagonal=`` only."""
    AttentionInterface.register(IMPLEMENTATION, attend)
    model.set_attn_implementation(IMPLEMENTATION)
