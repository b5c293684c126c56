"""Denominators, over a whole optimizer step: by how much each trained token of a row counts.

The loss of a step is sum over rows r of weight_r * sum over trained tokens t of loss_rt, so it is the same however the
rows are split into micro-batches. Rows without a trained token are not passed in. Legend: R rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tasks.training.config import TrainingConfig
from tasks.training.plugins import NORMALISERS, check_takes, resolve

Normaliser = Callable[[np.ndarray, Sequence[str], int], np.ndarray]
"""(trained tokens of each row, int [R], all > 0; family of each row [R]; number of families of the update) -> weight of
a token of each row, float64 [R]."""


def token_mean(num_tokens_R: np.ndarray, families_R: Sequence[str], num_families: int) -> np.ndarray:
    """Every trained token counts the same: 1 / tokens of the step (DAPO, arXiv 2503.14476, section 3.3)."""
    return np.full(len(num_tokens_R), 1.0 / max(1, int(num_tokens_R.sum())))


def sequence_mean(num_tokens_R: np.ndarray, families_R: Sequence[str], num_families: int) -> np.ndarray:
    """Every row counts the same: 1 / (tokens of the row * rows of the step) (GRPO, arXiv 2402.03300, equation 3)."""
    return 1.0 / (num_tokens_R * float(len(num_tokens_R)))


def family_token_mean(num_tokens_R: np.ndarray, families_R: Sequence[str], num_families: int) -> np.ndarray:
    """Token mean within each family, families weigh the same: 1 / (tokens of the family in the step * families).

    A global token mean lets families with long episodes drown the others. ``num_families`` is that of the update, so
    the weight of a family does not jump when another one has no trained token in some step.
    """
    tokens_of: Counter[str] = Counter()
    for family, num_tokens in zip(families_R, num_tokens_R, strict=True):
        tokens_of[family] += int(num_tokens)
    return np.array([1.0 / (tokens_of[family] * num_families) for family in families_R])


def fixed_length(
    num_tokens_R: np.ndarray, families_R: Sequence[str], num_families: int, *, num_tokens: int
) -> np.ndarray:
    """Every token counts 1 / (constant * rows of the step), however long its row is (Dr. GRPO, arXiv 2503.20783,
    section 3): a long row is neither favoured nor spared."""
    return np.full(len(num_tokens_R), 1.0 / (num_tokens * max(1, len(num_tokens_R))))


def build_normaliser(config: TrainingConfig) -> Normaliser:
    """The configured denominator, times the weights of families. Raises ValueError for one that cannot be found."""
    normalise: Normaliser = resolve("training.normaliser", config.normaliser, NORMALISERS)
    if config.normaliser not in NORMALISERS:
        check_takes(f"training.normaliser is {config.normaliser!r}, which", normalise, 3)
    if config.normaliser == "fixed_length":
        assert config.fixed_length_tokens is not None, "the configuration asks for it"
        normalise = partial(fixed_length, num_tokens=config.fixed_length_tokens)
    weights = {name: family.weight for name, family in config.families.items() if family.weight != 1.0}
    return partial(_weighted, normalise, weights) if weights else normalise


def _weighted(
    normalise: Normaliser,
    weights: dict[str, float],
    num_tokens_R: np.ndarray,
    families_R: Sequence[str],
    num_families: int,
) -> np.ndarray:
    of_rows = np.array([weights.get(family, 1.0) for family in families_R])
    return of_rows * normalise(num_tokens_R, families_R, num_families)
