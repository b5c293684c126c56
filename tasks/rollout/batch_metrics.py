"""What a batch looked like when it was taken, as flat metrics: ``<metric>`` in all, ``<metric>/<family>`` each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from resources.rollout.gate_counters import GAUGES
from resources.rollout.messages import Batch

HISTOGRAMS = ("lag", "span", "queue_lag")
SHARES = {
    "cross_policy.stale_turns": ("turn_share", "num_turns"),
    "cross_policy.stale_tokens": ("token_share", "num_sampled_tokens"),
}
"""Share that a counter is of another one, for cross-policy sampling."""


def batch_metrics(batch: Batch) -> dict[str, Any]:
    """The gate's per-family counters with their sums (histograms: over all families only; gauges have none), and the
    success share among members whose verdict is known."""
    metrics: dict[str, Any] = {}
    sums: Counter[str] = Counter()
    histograms: dict[str, Counter[str]] = {name: Counter() for name in HISTOGRAMS}
    for key, value in batch.counters.items():
        name = key.split("/", 1)[0]
        if name in histograms:
            histograms[name].update(value)
            continue
        metrics[key] = value
        if not name.endswith("_max") and name not in GAUGES:
            sums[name] += value
    metrics |= _cross_policy({**metrics, **sums})
    verdicts: dict[str, list[bool]] = {}
    for group in batch.groups:
        known = [member.success for member in group.members if member.success is not None]
        verdicts.setdefault(group.family, []).extend(known)
    for family, known in verdicts.items():
        if known:
            metrics[f"success/{family}"] = sum(known) / len(known)
    return {**metrics, **sums, **{f"staleness/{name}_histogram": dict(counts) for name, counts in histograms.items()}}


def _cross_policy(counters: Mapping[str, Any]) -> dict[str, float]:
    """Shares that stale engines sampled, ``cross_policy/turn_share`` and ``cross_policy/token_share``, in all and by
    family; none where nothing was sampled, or cross-policy sampling is off."""
    shares = {}
    for key, number in counters.items():
        name, slash, family = key.partition("/")
        share, of = SHARES.get(name, ("", ""))
        total = counters.get(f"{of}{slash}{family}", 0)
        if total:
            shares[f"cross_policy/{share}{slash}{family}"] = number / total
    return shares
