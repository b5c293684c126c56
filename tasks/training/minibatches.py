"""Which rows share an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def deal_minibatches(families: Sequence[str], num_minibatches: int, rng: np.random.Generator) -> list[list[int]]:
    """Shuffle rows within their family and deal them out, so that every minibatch holds its share of each family.

    Sizes differ by at most one overall. Empty minibatches are left out: with fewer rows than minibatches there are
    fewer optimizer steps. Advantages are computed before, so siblings of a group need not stay together.
    """
    order: list[int] = []
    for family in sorted(set(families)):
        rows = np.array([index for index, other in enumerate(families) if other == family])
        order.extend(int(row) for row in rng.permutation(rows))
    dealt = [order[first::num_minibatches] for first in range(num_minibatches)]
    return [sorted(minibatch) for minibatch in dealt if minibatch]
