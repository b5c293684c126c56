"""Which rows go through the model together, and how they lie there.

Masks come from lengths and from the rows' own masks, never from token values: a pad token may be a word like any other.
Legend: B sequences of a micro-batch, T their tokens, L the longest of them, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from tasks.training.attention import BlockDiagonal

Layout = Literal["packed", "padded"]
IGNORE = -100
"""Label of a position whose next token is not trained."""


@dataclass(frozen=True, slots=True)
class PackableSequence:
    """What packing needs to know of a row."""

    token_ids: np.ndarray
    """int [T]"""
    trained: np.ndarray
    """bool [T]: this token's log-probability enters the loss. Position 0 never does: nothing precedes it."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the model at once."""

    rows: tuple[int, ...]
    """Which sequences, in the order in which they lie here."""
    model_inputs: dict[str, Any]
    """Keyword arguments of the decoder."""
    hidden_index_N: torch.Tensor
    """int64 [N]: where, in the flattened hidden states, the position lies that predicts each trained token."""
    targets_N: torch.Tensor
    """int64 [N]: the trained tokens."""
    inverse_temperature_N: torch.Tensor | None
    """float32 [N]; None when every row was sampled at temperature 1."""
    sequence_N: torch.Tensor
    """int64 [N]: which of ``rows`` a trained token belongs to (0 to B - 1)."""
    num_tokens: int
    """Tokens of the rows, padding not counted."""


def plan_microbatches(lengths: Sequence[int], max_tokens: int, layout: Layout = "packed") -> list[list[int]]:
    """Indices of the sequences of each micro-batch, shortest first, so that lengths within one are alike.

    A micro-batch holds at most ``max_tokens`` tokens, padding included where the layout pads; a longer sequence goes
    alone. Every index appears exactly once.
    """
    plan: list[list[int]] = []
    used = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        length = lengths[index]
        needed = used + length if layout == "packed" else (len(plan[-1]) + 1) * length if plan else length
        if plan and needed <= max_tokens:
            plan[-1].append(index)
            used += length
        else:
            plan.append([index])
            used = length
    return plan


def next_token_labels(sequences: Sequence[PackableSequence]) -> list[np.ndarray]:
    """For each sequence, int64 [T]: the token that position t has to predict, or IGNORE. The last position never has
    one."""
    labels = []
    for sequence in sequences:
        row = np.full(len(sequence.token_ids), IGNORE, np.int64)
        row[:-1] = np.where(sequence.trained[1:], sequence.token_ids[1:], IGNORE)
        labels.append(row)
    return labels


def pack(
    sequences: Sequence[PackableSequence], rows: Sequence[int], layout: Layout = "packed", device: str = "cpu"
) -> MicroBatch:
    """Lay the named sequences out for one forward pass."""
    chosen = [sequences[row] for row in rows]
    lengths = np.array([len(sequence.token_ids) for sequence in chosen])
    trained = [sequence.trained[1:].nonzero()[0] for sequence in chosen]
    counts = np.array([len(positions) for positions in trained])
    if layout == "packed":
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        model_inputs = {
            "input_ids": _tensor(np.concatenate([sequence.token_ids for sequence in chosen])[None], device),
            "position_ids": _tensor(np.concatenate([np.arange(length) for length in lengths])[None], device),
            "block_diagonal": BlockDiagonal.of_lengths(lengths, device),
        }
    else:
        longest = int(lengths.max())
        starts = np.arange(len(chosen)) * longest
        input_ids = np.zeros((len(chosen), longest), np.int64)
        for place, sequence in zip(input_ids, chosen, strict=True):
            place[: len(sequence.token_ids)] = sequence.token_ids
        model_inputs = {
            "input_ids": _tensor(input_ids, device),
            "position_ids": _tensor(np.tile(np.arange(longest), (len(chosen), 1)), device),
            "attention_mask": _tensor(np.arange(longest) < lengths[:, None], device),
        }
    temperatures = np.repeat([sequence.temperature for sequence in chosen], counts)
    return MicroBatch(
        rows=tuple(rows),
        model_inputs=model_inputs,
        hidden_index_N=_tensor(np.concatenate([s + p for s, p in zip(starts, trained, strict=True)]), device),
        targets_N=_tensor(np.concatenate([s.token_ids[1:][p] for s, p in zip(chosen, trained, strict=True)]), device),
        inverse_temperature_N=(
            None
            if (temperatures == 1.0).all()
            else torch.as_tensor(1.0 / temperatures, dtype=torch.float32, device=device)
        ),
        sequence_N=_tensor(np.repeat(np.arange(len(chosen)), counts), device),
        num_tokens=int(lengths.sum()),
    )


def filler(layout: Layout = "packed", device: str = "cpu") -> MicroBatch:
    """A micro-batch of no row: one token goes through the model, none is trained. A rank that has run out of rows runs
    it where others still have some, because a sharded model runs on all ranks or on none."""
    nothing = PackableSequence(np.zeros(1, np.int64), np.zeros(1, np.bool_))
    return replace(pack([nothing], [0], layout, device), rows=(), num_tokens=0)


def _tensor(array: np.ndarray, device: str) -> torch.Tensor:
    dtype = torch.bool if array.dtype == np.bool_ else torch.int64
    return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype, device=device)
