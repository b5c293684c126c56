"""Which rows share an optimizer step, and which rank runs which of them?"""

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


def deal_to_ranks(num_tokens: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of the rows that each rank runs, ascending: longest row first, to the rank with the fewest tokens so far.

    No rank then has more than 4/3 of the smallest possible largest load (Graham's bound). Deterministic, so that every
    rank knows the share of all.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(num_tokens)), key=lambda i: -num_tokens[i]):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += num_tokens[index]
    return [sorted(share) for share in shares]
