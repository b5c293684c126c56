"""One batched forward pass over the KV cache: single tokens of many histories and longer pieces of others, together.

Rows of a pass are tokens, packed without padding: first the *singles* (one next token of a history each), then the
*pieces* (several tokens of one history, whose KV is not computed yet). Linear layers run over all rows at once;
attention runs over the singles in one call (or one by one when they are few among many slots) and piece by piece.

In the last layer only rows that a token is sampled from need more than their keys and values: every single, and the
last row of each piece that completes its history.

Shapes: N rows, B sampled rows, S slots, K key-value heads, G query heads per key-value head, D head size, M context.
"""

from __future__ import annotations

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
        self.cache = torch.zeros(shape, dtype=torch.float32, device=self.device)
        """[layers, S, 2K, M, D]: keys of the K heads, then values."""
        self._cache_rows = self.cache.view(layout.num_layers, -1, head_dim)
        self._head_offsets = np.arange(2 * kv_heads, dtype=np.int64) * context_length
        frequencies = torch.tensor(layout.inverse_frequencies, dtype=torch.float32)
        angles = torch.arange(context_length, dtype=torch.float32)[:, None] * frequencies
        rotation = torch.polar(torch.full_like(angles, layout.rotary_scale), angles)
        self._rotation = rotation[:, None, :].to(self.device)
        """complex64 [M, 1, D/2]"""
        self._positions = torch.arange(context_length, device=self.device)
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
        cache_rows = self._to_device((cache_bases[:, None] + self._head_offsets).reshape(-1))
        rotation = self._rotation[self._to_device(all_positions)]
        singles = _SingleAttention(self, single_slots, single_positions)
        sampled_rows = None if not pieces else self._to_device(np.concatenate(last_rows))
        if pieces:
            sampled_slots = np.concatenate([single_slots, np.array([p.slot for p in completed], dtype=np.int64)])
            sampled_ends = np.concatenate([single_positions, np.array([p.end - 1 for p in completed], dtype=np.int64)])
            last_attention = _SingleAttention(self, sampled_slots, sampled_ends)
        else:
            last_attention = singles

        x = F.embedding(self._to_device(token_ids), weights.embedding)
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
        num_rows, head_dim = len(x), layout.head_dim
        normed = self._normalise(x)
        qkv = torch.mm(normed, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normed, layer.qkv)
        heads = qkv.view(num_rows, -1, head_dim)
        rotated = heads[:, : layout.num_heads + layout.num_kv_heads]
        if layer.qk_scale is not None:
            lengths = torch.linalg.vector_norm(rotated, dim=-1, keepdim=True)
            rotated.div_(torch.hypot(lengths, self._head_eps)).mul_(layer.qk_scale)
        torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(rotation)
        self._cache_rows[index].index_copy_(0, cache_rows, heads[:, layout.num_heads :].reshape(-1, head_dim))
        return heads[:, : layout.num_heads].unflatten(1, (layout.num_kv_heads, self._group))

    def _finish_layer(self, layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = torch.addmm(x, attended.reshape(len(x), -1), layer.output)
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
        seen = self._positions[:end] <= self._positions[start:end, None]
        bias = torch.zeros(seen.shape, device=self.device).masked_fill_(~seen, -torch.inf)
        return bias.repeat(self._group, 1)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


class _SingleAttention:
    """Attention of one query per history. Planned once a pass, used in every layer.

    On a CPU a call over a range of slots costs about 20 ns per (slot, position), padding to the longest history
    included; a call for one slot costs about 10 us and 15 ns per position. The cheaper plan is taken; copying the keys
    of the active slots together would cost as much as reading them twice.
    """

    RANGE_NS_PER_POSITION = 25.0
    CALL_NS = 12_000.0
    SINGLE_NS_PER_POSITION = 15.0

    def __init__(self, forward: LocalForward, slots: np.ndarray, positions: np.ndarray) -> None:
        self._kv_heads = forward.layout.num_kv_heads
        self._slots = slots
        if not len(slots):
            return
        lengths = positions + 1
        self._low, high = int(slots.min()), int(slots.max()) + 1
        self._longest = int(lengths.max())
        self._num_in_range = high - self._low
        range_ns = self.CALL_NS + self.RANGE_NS_PER_POSITION * self._num_in_range * self._longest
        single_ns = self.CALL_NS * len(slots) + self.SINGLE_NS_PER_POSITION * int(lengths.sum())
        self._one_by_one = single_ns < range_ns and forward.device.type == "cpu"
        if self._one_by_one:
            self._pairs = list(zip(slots.tolist(), lengths.tolist(), strict=True))
            return
        range_lengths = np.ones(self._num_in_range, dtype=np.int64)
        range_lengths[slots - self._low] = lengths
        hidden = forward._positions[: self._longest] >= forward._to_device(range_lengths)[:, None]
        self._bias = torch.zeros(hidden.shape, device=forward.device).masked_fill_(hidden, -torch.inf)[:, None, None]
        # Slots in ascending order without a hole need no reordering.
        whole = len(slots) == self._num_in_range and bool((np.diff(slots) == 1).all())
        self._places = None if whole else forward._to_device(slots - self._low)

    def attend(self, queries: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """``queries`` [B, K, G, D] and the cache of one layer [S, 2K, M, D] -> [B, K, G, D]."""
        kv_heads = self._kv_heads
        if self._one_by_one:
            parts = [
                F.scaled_dot_product_attention(
                    queries[row : row + 1],
                    cache[slot : slot + 1, :kv_heads, :length],
                    cache[slot : slot + 1, kv_heads:, :length],
                    scale=1.0,
                )
                for row, (slot, length) in enumerate(self._pairs)
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        in_range = cache[self._low : self._low + self._num_in_range]
        keys, values = in_range[:, :kv_heads, : self._longest], in_range[:, kv_heads:, : self._longest]
        if self._places is None:
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._bias, scale=1.0)
        spread = queries.new_zeros(self._num_in_range, *queries.shape[1:])
        spread[self._places] = queries
        attended = F.scaled_dot_product_attention(spread, keys, values, attn_mask=self._bias, scale=1.0)
        return attended[self._places]
