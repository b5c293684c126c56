"""One batched forward pass over the KV cache: single tokens of many histories and longer pieces of others, together.

Rows of a pass are tokens, packed without padding: first the *singles* (one next token of a history each), then the
*pieces* (several tokens of one history, whose KV is not computed yet). Linear layers run over all rows at once;
attention runs over the singles in a few calls (one where their lengths are alike) and piece by piece.

In the last layer only rows that a token is sampled from need more than their keys and values: every single, and the
last row of each piece that completes its history.

Shapes: N rows, B sampled rows, S slots, K key-value heads, G query heads per key-value head, D head size, M context.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from resources.engines.local_layout import ModelLayout
from resources.engines.local_weights import FusedWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``start .. end`` of the history in ``slot``; ``completes``: a token is sampled after the last of them."""

    slot: int
    start: int
    end: int
    completes: bool


class LocalForward:
    """The KV cache of one engine and the pass that fills and reads it. Not thread-safe: one step thread owns it."""

    def __init__(self, layout: ModelLayout, num_slots: int, context_length: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.context_length = context_length
        self.device = torch.device(device)
        kv_heads, head_dim = layout.num_kv_heads, layout.head_dim
        self._group = layout.num_heads // kv_heads
        shape = (layout.num_layers, num_slots, 2 * kv_heads, context_length, head_dim)
        self.cache = _zeros(shape, self.device)
        """[layers, S, 2K, M, D]: keys of the K heads, then values."""
        self._cache_rows = self.cache.view(layout.num_layers, -1, head_dim)
        self._head_offsets = np.arange(2 * kv_heads, dtype=np.int64) * context_length
        frequencies = torch.tensor(layout.inverse_frequencies, dtype=torch.float32)
        angles = torch.arange(context_length, dtype=torch.float32)[:, None] * frequencies
        rotation = torch.polar(torch.full_like(angles, layout.rotary_scale), angles)
        self._rotation = rotation[:, None, :].to(self.device)
        """complex64 [M, 1, D/2]"""
        self.positions = torch.arange(context_length, device=self.device)
        # |x|^2 + E eps under the root of the norm, as hypot(|x|, sqrt(E eps)).
        self._hidden_eps = torch.tensor((layout.hidden_size * layout.norm_eps) ** 0.5, device=self.device)
        self._head_eps = torch.tensor((head_dim * layout.norm_eps) ** 0.5, device=self.device)

    def kv_bytes_per_token(self) -> int:
        return self.layout.num_layers * 2 * self.layout.num_kv_heads * self.layout.head_dim * 4

    def copy_prefix(self, source: int, target: int, start: int, end: int) -> None:
        """Copy the KV of tokens ``start .. end`` from one slot to another."""
        self.cache[:, target, :, start:end] = self.cache[:, source, :, start:end]

    def logits(
        self,
        weights: FusedWeights,
        token_ids: np.ndarray,
        single_slots: np.ndarray,
        single_positions: np.ndarray,
        pieces: Sequence[Piece],
    ) -> torch.Tensor:
        """Float32 [B, V]: next-token logits of the singles, then of the pieces that complete their history.

        ``token_ids`` is int64 [N]: singles, then the pieces' tokens in order. ``single_slots`` ascend. The KV of all N
        tokens is in the cache afterwards.
        """
        num_singles = len(single_slots)
        slots = [single_slots]
        positions = [single_positions]
        offset = num_singles
        placed: list[tuple[int, int, Piece, torch.Tensor]] = []
        last_rows, completed = [np.arange(num_singles)], []
        for piece in pieces:
            length = piece.end - piece.start
            slots.append(np.full(length, piece.slot))
            positions.append(np.arange(piece.start, piece.end))
            placed.append((offset, offset + length, piece, self._causal_bias(piece.start, piece.end)))
            offset += length
            if piece.completes:
                last_rows.append(np.array([offset - 1]))
                completed.append(piece)
        all_positions = np.concatenate(positions)
        cache_bases = np.concatenate(slots) * (len(self._head_offsets) * self.context_length) + all_positions
        cache_rows = self.to_device((cache_bases[:, None] + self._head_offsets).reshape(-1))
        rotation = self._rotation[self.to_device(all_positions)]
        singles = SingleAttention(self, single_slots, single_positions)
        sampled_rows = None if not pieces else self.to_device(np.concatenate(last_rows))
        if pieces:
            sampled_slots = np.concatenate([single_slots, np.array([p.slot for p in completed], dtype=np.int64)])
            sampled_ends = np.concatenate([single_positions, np.array([p.end - 1 for p in completed], dtype=np.int64)])
            last_attention = SingleAttention(self, sampled_slots, sampled_ends)
        else:
            last_attention = singles

        x = F.embedding(self.to_device(token_ids), weights.embedding)
        last = self.layout.num_layers - 1
        for index, layer in enumerate(weights.layers):
            queries = self._project(layer, index, x, rotation, cache_rows)
            if index < last:
                attended = torch.empty_like(queries)
                if num_singles:
                    attended[:num_singles] = singles.attend(queries[:num_singles], self.cache[index])
                for start, end, piece, bias in placed:
                    self._attend_piece(queries[start:end], piece, bias, self.cache[index], attended[start:end])
            else:
                if sampled_rows is not None:
                    x, queries = x[sampled_rows], queries[sampled_rows]
                if not len(x):
                    return x.new_empty(0, self.layout.vocab_size)
                attended = last_attention.attend(queries, self.cache[index])
            x = self._finish_layer(layer, x, attended)
        return torch.mm(self._normalise(x), weights.head)

    def _project(
        self, layer: LayerWeights, index: int, x: torch.Tensor, rotation: torch.Tensor, cache_rows: torch.Tensor
    ) -> torch.Tensor:
        """Rotated queries [N, K, G, D]; keys and values go to the cache."""
        layout = self.layout
        num_rows, head_dim, num_rotated = x.shape[0], layout.head_dim, layout.num_heads + layout.num_kv_heads
        normed = self._normalise(x)
        qkv = torch.mm(normed, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normed, layer.qkv)
        heads = qkv.view(num_rows, -1, head_dim)
        rotated = heads[:, :num_rotated]
        if layer.qk_scale is not None:
            lengths = torch.linalg.vector_norm(rotated, dim=-1, keepdim=True)
            rotated.div_(torch.hypot(lengths, self._head_eps)).mul_(layer.qk_scale)
        torch.view_as_complex(rotated.view(num_rows, num_rotated, head_dim // 2, 2)).mul_(rotation)
        self._cache_rows[index].index_copy_(0, cache_rows, heads[:, layout.num_heads :].reshape(-1, head_dim))
        return heads[:, : layout.num_heads].view(num_rows, layout.num_kv_heads, self._group, head_dim)

    def _finish_layer(self, layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = torch.addmm(x, attended.reshape(x.shape[0], -1), layer.output)
        if layer.output_bias is not None:
            x += layer.output_bias
        normed = self._normalise(x)
        if layer.gate_up_bias is None:
            gate_up = torch.mm(normed, layer.gate_up)
        else:
            gate_up = torch.addmm(layer.gate_up_bias, normed, layer.gate_up)
        width = self.layout.intermediate_size
        x = torch.addmm(x, F.silu(gate_up[:, :width]).mul_(gate_up[:, width:]), layer.down)
        if layer.down_bias is not None:
            x += layer.down_bias
        return x

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm to length 1; weight and width are folded into the matrix that follows."""
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._hidden_eps)

    def _attend_piece(
        self, queries: torch.Tensor, piece: Piece, bias: torch.Tensor, cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """``queries`` and ``out`` are [n, K, G, D]; ``bias`` [G n, L]. The G heads of a group are stacked as rows."""
        length, kv_heads = len(queries), self.layout.num_kv_heads
        stacked = queries.permute(1, 2, 0, 3).reshape(kv_heads, 1, self._group * length, -1)
        keys = cache[piece.slot, :kv_heads, None, : piece.end]
        values = cache[piece.slot, kv_heads:, None, : piece.end]
        attended = F.scaled_dot_product_attention(stacked, keys, values, attn_mask=bias, scale=1.0)
        out.copy_(attended.view(kv_heads, self._group, length, -1).permute(2, 0, 1, 3))

    def _causal_bias(self, start: int, end: int) -> torch.Tensor:
        """Float32 [G (end - start), end]: 0 where a token may look, -inf elsewhere."""
        seen = self.positions[:end] <= self.positions[start:end, None]
        bias = torch.zeros(seen.shape, device=self.device).masked_fill_(~seen, -torch.inf)
        return bias.repeat(self._group, 1)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Float32 zeros; on a CPU in huge pages where the system has them, since a step walks through all of the cache
    (measured: a quarter less time in attention)."""
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=torch.float32, device=device)
    memory = mmap.mmap(-1, 4 * math.prod(shape))
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


class SingleAttention:
    """Attention of one query per history. Planned once a pass, used in every layer.

    A call covers a range of neighbouring slots, padded to the longest history among them, idle slots included. The plan
    cuts the slots into ranges so that padding costs less than the calls it saves: reading KV dominates, so copying the
    active histories together would cost as much as reading them twice.
    """

    CALL_NS = 14_000.0
    NS_PER_VALUE = 0.8
    """Time per value of a key. Measured on one core, for a position of two heads of 32: 30 ns from the core's own
    cache, 50 ns and more from memory."""

    def __init__(self, forward: LocalForward, slots: np.ndarray, positions: np.ndarray) -> None:
        layout = forward.layout
        self._kv_heads = layout.num_kv_heads
        self._places: torch.Tensor | None = None
        lengths = positions + 1
        order = np.argsort(slots, kind="stable")
        ranges = self._plan(slots[order].tolist(), lengths[order].tolist(), layout.num_kv_heads * layout.head_dim)
        self._calls: list[tuple[int, int, int, int, torch.Tensor | None]] = []
        offset = 0
        places = np.empty(forward.num_slots, dtype=np.int64)
        slot_lengths = np.ones(forward.num_slots, dtype=np.int64)
        slot_lengths[slots] = lengths
        for low, high, longest in ranges:
            bias = None
            if high - low > 1:
                hidden = forward.positions[:longest] >= forward.to_device(slot_lengths[low:high])[:, None]
                bias = torch.zeros(hidden.shape, device=forward.device).masked_fill_(hidden, -torch.inf)[:, None, None]
            self._calls.append((offset, low, high, longest, bias))
            places[low:high] = np.arange(offset, offset + high - low)
            offset += high - low
        self._num_places = offset
        wanted = places[slots]
        if offset != len(slots) or (np.diff(wanted) != 1).any():
            self._places = forward.to_device(wanted)

    def attend(self, queries: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """``queries`` [B, K, G, D] and the cache of one layer [S, 2K, M, D] -> [B, K, G, D]."""
        if self._places is not None:
            placed = queries.new_zeros(self._num_places, *queries.shape[1:])
            placed[self._places] = queries
        else:
            placed = queries
        kv_heads = self._kv_heads
        parts = [
            F.scaled_dot_product_attention(
                placed[offset : offset + high - low],
                cache[low:high, :kv_heads, :longest],
                cache[low:high, kv_heads:, :longest],
                attn_mask=bias,
                scale=1.0,
            )
            for offset, low, high, longest, bias in self._calls
        ]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended if self._places is None else attended[self._places]

    @classmethod
    def _plan(cls, slots: list[int], lengths: list[int], values_per_position: int) -> list[tuple[int, int, int]]:
        """Ascending slots and their lengths -> (low, high, longest) of each call, greedily from the lowest slot."""
        ns = cls.NS_PER_VALUE * values_per_position
        ranges: list[tuple[int, int, int]] = []
        for slot, length in zip(slots, lengths, strict=True):
            if ranges:
                low, high, longest = ranges[-1]
                together = ns * (slot + 1 - low) * max(longest, length)
                apart = ns * (high - low) * longest + cls.CALL_NS + ns * length
                if together <= apart:
                    ranges[-1] = (low, slot + 1, max(longest, length))
                    continue
            ranges.append((slot, slot + 1, length))
        return ranges
