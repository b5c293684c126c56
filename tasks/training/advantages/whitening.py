"""Mean 0 and standard deviation 1 over chosen tokens, and what happens when there is nothing to divide by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tasks.training.advantages.groups import EQUAL_REWARDS


def whiten(values_RT: Sequence[np.ndarray], chosen_RT: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(value - mean) / deviation over the chosen tokens of all rows together, each token once, ddof 0, in float64.

    Without a second chosen token nothing is changed: one token has no deviation. When all are equal (but for rounding)
    they become 0, and nothing is divided. Tokens that are not chosen keep their values. float32 [T] each.
    """
    chosen = np.concatenate([v[c] for v, c in zip(values_RT, chosen_RT, strict=True)] or [np.zeros(0)])
    chosen = chosen.astype(np.float64)
    if chosen.size < 2:
        return [np.array(values, np.float32) for values in values_RT]
    mean = chosen.mean()
    is_flat = np.ptp(chosen) <= EQUAL_REWARDS * np.abs(chosen).max()
    deviation = 1.0 if is_flat else chosen.std()
    whitened = []
    for values, mask in zip(values_RT, chosen_RT, strict=True):
        row = np.array(values, np.float32)
        row[mask] = 0.0 if is_flat else (values[mask].astype(np.float64) - mean) / deviation
        whitened.append(row)
    return whitened
