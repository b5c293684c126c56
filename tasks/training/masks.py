"""Which sampled tokens are trained, derived anew for every update: the stored masks are never rewritten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tasks.training.advantages.base import AdvantageInputs
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
    inputs: AdvantageInputs, excluded: Sequence[str | None], truncated_rows: Literal["train", "mask"]
) -> TrainingMasks:
    """Of the tokens that are trainable, drop those of excluded rows (``unscored``, ``dead_group``); count what is not
    trained of cut rows that are to be masked (``truncated``), of rows that no statistic counts, and beyond the
    staleness bound (both ``stale``)."""
    trained: list[np.ndarray] = []
    masked: Counter[str] = Counter()
    for row, trainable, counted, cause in zip(
        inputs.rows, inputs.trainable_RT, inputs.counted_R, excluded, strict=True
    ):
        if cause is None and row.truncated and truncated_rows == "mask":
            cause = "truncated"
        if cause in (None, "dead_group") and not counted:
            cause = "stale"
        mask = trainable if cause is None else np.zeros_like(trainable)
        masked[cause or "stale"] += int(row.loss_mask.sum()) - int(mask.sum())
        trained.append(mask)
    return TrainingMasks(trained, {cause: count for cause, count in masked.items() if count})
