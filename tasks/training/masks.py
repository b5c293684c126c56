"""Which sampled tokens are trained, derived anew for every update: the stored masks are never rewritten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasks.training.row import TrainingRow


@dataclass(frozen=True, slots=True)
class TrainingMasks:
    trained_RT: list[np.ndarray]
    """bool [T] for each row: sampled, and nothing speaks against training it."""
    masked_tokens: dict[str, int]
    """Sampled tokens that are not trained, by cause; each counts once, under the first cause that applies."""


def is_beyond_bound(row: TrainingRow, version: int, max_staleness: int | None) -> bool:
    """Whether every sampled token of a row (at least one) is beyond the staleness bound."""
    sampled = row.token_versions[row.loss_mask]
    return max_staleness is not None and sampled.size > 0 and version - int(sampled.max()) > max_staleness


def trainable_tokens(
    row: TrainingRow, version: int, max_staleness: int | None, truncated_rows: Literal["train", "mask"]
) -> np.ndarray:
    """bool [T]: sampled, within the staleness bound, and not of a cut row that is to be masked."""
    mask = row.loss_mask.astype(np.bool_)
    if row.truncated and truncated_rows == "mask":
        return np.zeros_like(mask)
    return mask if max_staleness is None else mask & (version - row.token_versions <= max_staleness)


def derive_masks(
    rows: Sequence[TrainingRow],
    excluded: Sequence[str | None],
    counted_R: Sequence[bool],
    *,
    version: int,
    max_staleness: int | None,
    truncated_rows: Literal["train", "mask"],
) -> TrainingMasks:
    """Drop excluded rows whole (``unscored``, ``dead_group``), cut rows if so configured (``truncated``), rows that no
    statistic counts (``stale``), and tokens beyond the staleness bound (``stale`` as well: version minus the token's
    own version exceeds it; None: no bound)."""
    trained: list[np.ndarray] = []
    masked: Counter[str] = Counter()
    for row, cause, counted in zip(rows, excluded, counted_R, strict=True):
        if cause is None and row.truncated and truncated_rows == "mask":
            cause = "truncated"
        if cause in (None, "dead_group") and not counted:
            cause = "stale"
        if cause is not None:
            masked[cause] += int(row.loss_mask.sum())
            trained.append(np.zeros(len(row.token_ids), np.bool_))
            continue
        mask = trainable_tokens(row, version, max_staleness, truncated_rows)
        masked["stale"] += int(row.loss_mask.sum()) - int(mask.sum())
        trained.append(mask)
    return TrainingMasks(trained, {cause: count for cause, count in masked.items() if count})
