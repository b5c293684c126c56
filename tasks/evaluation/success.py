"""Success rates of held-out episodes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from resources.rollout.messages import BatchGroup


def success_by_family(groups: Iterable[BatchGroup]) -> dict[str, Any]:
    """Success rate, its standard error and the number of episodes by family, and the unweighted mean over families.

    Episodes without a verdict (failed environment, lost score) are left out and counted as ``unscored``. Raises
    ValueError when a family has no scored episode: its rate would be made up.
    """
    outcomes: dict[str, list[bool]] = defaultdict(list)
    unscored: dict[str, int] = defaultdict(int)
    for group in groups:
        outcomes[group.family]  # a family whose episodes all failed must not vanish from the result
        for member in group.members:
            if member.success is None:
                unscored[group.family] += 1
            else:
                outcomes[group.family].append(member.success)
    empty = sorted(family for family, values in outcomes.items() if not values)
    if empty or not outcomes:
        raise ValueError(f"no held-out episode was scored for {empty or 'any family'}; see the log for their failures")
    rate = {family: sum(values) / len(values) for family, values in sorted(outcomes.items())}
    return {
        "success": rate,
        "standard_error": {f: math.sqrt(p * (1 - p) / len(outcomes[f])) for f, p in rate.items()},
        "num_episodes": {f: len(outcomes[f]) for f in rate},
        "unscored": {f: unscored[f] for f in rate},
        "mean": sum(rate.values()) / len(rate),
    }
