"""A forward pass whose every row is computed alike, whoever its neighbours are: bitwise the same logits for a history,
however it was batched, cut into pieces or found in the prefix cache.

Floating-point sums depend on their order, and matrix products choose theirs by the shape of the whole product. So rows
run through the layers in blocks of a fixed number of rows, padded, and each row attends as a query of its own, over a
number of keys that its position implies. On one core, with the quickstart's policy, a step of 64 single tokens takes
1.7 times as long as without, one of a single token 2.2 times, a prefill of 800 tokens 3.6 times.

That a block's rows are computed alike is a property of the machine's kernels, so `check_invariance` tries it out before
the engine serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from resources.engines.local_forward import LocalForward, Piece
from resources.engines.local_layout import ModelLayout
from resources.engines.local_sampling import sample_tokens
from resources.engines.local_weights import FusedWeights

ROWS = 32
"""Rows of a block. A multiple of what two vector registers hold (32 float32), so that element-wise kernels have no
remainder, which they compute with other instructions."""
SPAN = 64
"""A row looks at a multiple of so many keys, the later ones masked: how many depends on its own position only, and rows
that look at equally many share a call."""


class InvariantForward(LocalForward):
    """`LocalForward` in blocks of `ROWS` rows. Has one slot more than asked for: where padding writes its keys."""

    def __init__(self, layout: ModelLayout, num_slots: int, context_length: int, device: str = "cpu") -> None:
        super().__init__(layout, num_slots + 1, context_length, device)

    def logits(
        self,
        weights: FusedWeights,
        token_ids: np.ndarray,
        single_slots: np.ndarray,
        single_positions: np.ndarray,
        pieces: Sequence[Piece],
    ) -> torch.Tensor:
        """See `LocalForward.logits`."""
        slots = np.concatenate([single_slots, *(np.full(piece.end - piece.start, piece.slot) for piece in pieces)])
        positions = np.concatenate([single_positions, *(np.arange(piece.start, piece.end) for piece in pieces)])
        ends = np.cumsum([len(single_slots), *(piece.end - piece.start for piece in pieces)])
        completed = [end - 1 for end, piece in zip(ends[1:], pieces, strict=True) if piece.completes]
        sampled = np.concatenate([np.arange(len(single_slots)), np.array(completed, dtype=np.int64)]).astype(np.int64)
        found = []
        # A piece's rows attend to those before them, which lie in this block or in an earlier one.
        for start in range(0, len(token_ids), ROWS):
            rows = slice(start, start + ROWS)
            wanted = sampled[(sampled >= start) & (sampled < start + ROWS)] - start
            block = self._block(weights, token_ids[rows], slots[rows], positions[rows], bool(len(wanted)))
            if block is not None:
                found.append(block[self.to_device(wanted)])
        return torch.cat(found) if found else torch.empty(0, self.layout.vocab_size, device=self.device)

    def _block(
        self, weights: FusedWeights, token_ids: np.ndarray, slots: np.ndarray, positions: np.ndarray, is_sampled: bool
    ) -> torch.Tensor | None:
        """Logits [ROWS, V] of at most `ROWS` rows, whose KV is in the cache afterwards; None unless ``is_sampled``."""
        num_rows = len(token_ids)
        padding = ROWS - num_rows
        token_ids = np.pad(token_ids, (0, padding))
        slots = np.pad(slots, (0, padding), constant_values=self.num_slots - 1)
        positions = np.pad(positions, (0, padding))
        bases = slots * (len(self._head_offsets) * self.context_length) + positions
        cache_rows = self.to_device((bases[:, None] + self._head_offsets).reshape(-1))
        rotation = self._rotation[self.to_device(positions)]
        calls = self._plan(slots[:num_rows], positions[:num_rows])
        x = F.embedding(self.to_device(token_ids), weights.embedding)
        last = self.layout.num_layers - 1
        for index, layer in enumerate(weights.layers):
            queries = self._project(layer, index, x, rotation, cache_rows)
            if index == last and not is_sampled:
                return None
            cache = self.cache[index]
            attended = torch.zeros_like(queries)
            for call in calls:
                self._attend(call, queries, cache, attended)
            x = self._finish_layer(layer, x, attended)
        return torch.mm(self._normalise(x), weights.head)

    def _plan(self, slots: np.ndarray, positions: np.ndarray) -> list[_Call]:
        """Neighbouring rows share a call when they look at equally many keys, of one slot or of slots in a row."""
        lengths = np.minimum((positions // SPAN + 1) * SPAN, self.context_length)
        calls: list[_Call] = []
        first = 0
        for row in range(1, len(slots) + 1):
            if row < len(slots) and lengths[row] == lengths[first]:
                steps = np.diff(slots[first : row + 1])
                if (steps == 0).all() or (steps == 1).all():
                    continue
            length = int(lengths[first])
            hidden = self.positions[:length] > self.to_device(positions[first:row])[:, None]
            bias = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, -torch.inf)[:, None, None]
            calls.append(_Call(first, row, int(slots[first]), int(slots[row - 1]) + 1, length, bias))
            first = row
        return calls

    def _attend(self, call: _Call, queries: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
        kv_heads, num_rows = self.layout.num_kv_heads, call.end - call.start
        kv = cache[call.low : call.high, :, : call.length].expand(num_rows, -1, -1, -1)
        out[call.start : call.end] = F.scaled_dot_product_attention(
            queries[call.start : call.end], kv[:, :kv_heads], kv[:, kv_heads:], attn_mask=call.bias, scale=1.0
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """Rows ``start .. end`` of a block attend over the first ``length`` keys of slots ``low .. high``: one slot for all
    of them, or one each. ``bias`` is [rows, 1, 1, length]."""

    start: int
    end: int
    low: int
    high: int
    length: int
    bias: torch.Tensor


def sample_tokens_in_blocks(
    logits_BV: torch.Tensor, temperatures_B: np.ndarray, noise_B: np.ndarray, greedy_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`sample_tokens`, each row alike whoever its neighbours are."""
    ids, logprobs = [], []
    for start in range(0, len(logits_BV), ROWS):
        rows = slice(start, start + ROWS)
        num_rows = len(noise_B[rows])
        padding = ROWS - num_rows
        ids_B, logprobs_B = sample_tokens(
            F.pad(logits_BV[rows], (0, 0, 0, padding)),
            np.pad(temperatures_B[rows], (0, padding), constant_values=1.0),
            np.pad(noise_B[rows], (0, padding)),
            np.pad(greedy_B[rows], (0, padding)),
        )
        ids.append(ids_B[:num_rows])
        logprobs.append(logprobs_B[:num_rows])
    return np.concatenate(ids), np.concatenate(logprobs)


@torch.inference_mode()
def check_invariance(forward: LocalForward, weights: FusedWeights) -> None:
    """Compute some histories twice, with other neighbours, in other pieces and other slots, and compare bit by bit.

    Raises ValueError when they differ: the kernels of this machine do not compute the rows of a block alike. Leaves
    nothing in the cache that a slot would be believed to hold.
    """
    num_histories = min(forward.num_slots - 1, 5)
    longest = min(forward.context_length, 2 * ROWS + 11)
    rng = np.random.default_rng(0)
    histories = rng.integers(0, forward.layout.vocab_size, (num_histories, longest))
    lengths = [max(2, longest - 7 * index) for index in range(num_histories)]
    slots = list(range(num_histories))
    together = _last_logits(forward, weights, histories, lengths, slots, longest)
    apart = _last_logits(forward, weights, histories, lengths, slots[::-1], 7)
    for index, (first, second) in enumerate(zip(together, apart, strict=True)):
        if not torch.equal(first, second):
            raise ValueError(
                "engine.batch_invariant is true, but on this machine the logits of a history depend on its neighbours "
                f"in a batch (by up to {float((first - second).abs().max()):.2g} in history {index} of the check); set "
                "it to false (and deterministic with it), or use other hardware"
            )


def _last_logits(
    forward: LocalForward,
    weights: FusedWeights,
    histories: np.ndarray,
    lengths: list[int],
    slots: list[int],
    piece_tokens: int,
) -> list[torch.Tensor]:
    """Logits after each history, computed side by side in pieces of so many tokens; single tokens go as singles."""
    done, found = [0] * len(lengths), [torch.empty(0)] * len(lengths)
    while any(start < end for start, end in zip(done, lengths, strict=True)):
        left = [index for index in np.argsort(slots).tolist() if done[index] < lengths[index]]
        singles = [index for index in left if lengths[index] - done[index] == 1]
        longer = [index for index in left if index not in singles]
        ends = {index: min(lengths[index], done[index] + piece_tokens) for index in longer}
        pieces = [Piece(slots[i], done[i], ends[i], ends[i] == lengths[i]) for i in longer]
        positions = np.array([lengths[index] - 1 for index in singles], dtype=np.int64)
        token_ids = [histories[singles, positions], *(histories[i, done[i] : ends[i]] for i in longer)]
        logits = forward.logits(
            weights,
            np.concatenate(token_ids).astype(np.int64),
            np.array([slots[index] for index in singles], dtype=np.int64),
            positions,
            pieces,
        )
        completed = [*singles, *(index for index in longer if ends[index] == lengths[index])]
        for index, row in zip(completed, logits, strict=True):
            found[index] = row.clone()
        for index in left:
            done[index] = ends.get(index, lengths[index])
    return found
