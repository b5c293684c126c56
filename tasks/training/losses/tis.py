"""TIS: the policy gradient with a truncated importance weight (Ionides 2008; as a loss for stale tokens in ROLL Flash,
arXiv 2510.11345).

Loss of a token: -sg(clip(r, 1 - low, 1 + high)) A log p as in `cispo`; the default bounds are 0 and 1, so that a token
which has become likelier counts as if it were on-policy.
"""

from __future__ import annotations

from tasks.training.losses.cispo import CISPO


class TIS(CISPO):
    """Weights in [0, 1] by default."""

    default_clip = (1.0, 0.0)
