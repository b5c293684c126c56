"""What the gate counts: cancelled and evicted work by length and reward, lags of what is trained."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from resources.rollout.group_state import FamilyState, Group, MemberState
from resources.rollout.messages import PolicyCounts, TrajectoryDone

if TYPE_CHECKING:
    from resources.rollout.staleness import StalenessGate

ALWAYS_SHOWN = ("evicted_groups", "failed_groups", "short_groups", "dead_groups", "redundant_groups", "retried")
"""Counters that every batch shows, zeros included."""


GAUGES = ("owed_groups", "prompt_epoch", "left_out_prompts", "success_so_far")
"""Figures that say how things stand after a batch: they have no sum over families."""


def count_cancelled(counts: Counter[str], termination: str, done: TrajectoryDone | None) -> None:
    """Book one cancelled trajectory: cancelling favours short episodes, so length and reward so far are kept.

    ``done`` is None when it never ran, or when its worker was lost.
    """
    counts[f"{termination}.trajectories"] += 1
    if done is not None:
        counts[f"{termination}.turns"] += done.num_turns
        counts[f"{termination}.tokens"] += done.num_tokens
        counts[f"{termination}.sampled_tokens"] += done.num_sampled_tokens
        counts[f"{termination}.length.{done.num_turns}"] += 1
        if done.reward is not None:
            # Counters are integers: the reward so far is kept in thousandths.
            counts[f"{termination}.reward_milli"] += round(1000 * done.reward)


def count_evicted(counts: Counter[str], group: Group, horizon: int) -> None:
    """Book a group beyond the bound; the members it still runs are booked when their end is reported."""
    counts["evicted_groups"] += 1
    oldest = group.oldest_version
    assert oldest is not None
    counts[f"evicted_lag.{horizon - oldest}"] += 1
    for member in group.members:
        if member.state is MemberState.SCORED and member.done is not None:
            count_cancelled(counts, "evicted_stale", member.done)


def counters_of_batch(gate: StalenessGate, version: int) -> dict[str, Any]:
    """``<figure>/<family>`` for the batch just taken; what is counted from now on belongs to the next one."""
    figures = {
        f"{figure}/{name}": value
        for name, family in gate.families.items()
        for figure, value in batch_counters(
            family,
            version,
            gate.counted_at_last_batch.get(name, {}),
            cross_policy=gate.config.cross_policy is not None,
        ).items()
    }
    gate.counted_at_last_batch = {name: dict(family.counts) for name, family in gate.families.items()}
    return figures | gauges(gate)


def batch_counters(
    family: FamilyState, version: int, counted_before: dict[str, int], *, cross_policy: bool = False
) -> dict[str, Any]:
    """Figures of one family in batch ``version``: lags of its trajectories, and what was counted since the last batch.

    ``lag``: learner's version minus oldest sampled version; ``span``: newest minus oldest version of one trajectory
    (lag gained in flight); ``queue_lag``: learner's version minus newest (lag gained waiting). Histograms have string
    keys, so that they survive JSON unchanged. Trajectories without a sampled token have no lag. ``cross_policy``: say
    what stale engines sampled.
    """
    policies: Counter[str] = Counter()
    lag: Counter[str] = Counter()
    span: Counter[str] = Counter()
    queue_lag: Counter[str] = Counter()
    num_members = num_tokens = num_sampled = num_turns = 0
    for group in family.in_training:
        for member in group.members:
            if member.state is not MemberState.SCORED or member.done is None:
                continue
            num_members += 1
            num_tokens += member.done.num_tokens
            num_sampled += member.done.num_sampled_tokens
            num_turns += member.done.num_turns
            policies.update(asdict(member.done.policies))
            if member.oldest_version is not None and member.done.newest_version is not None:
                lag[str(version - member.oldest_version)] += 1
                span[str(member.done.newest_version - member.oldest_version)] += 1
                queue_lag[str(version - member.done.newest_version)] += 1
    figures: dict[str, Any] = {
        "num_groups": len(family.in_training),
        "num_dead_groups": sum(not group.has_signal for group in family.in_training),
        "num_trajectories": num_members,
        "num_tokens": num_tokens,
        "num_sampled_tokens": num_sampled,
        "num_turns": num_turns,
        "lag_max": max((int(key) for key in lag), default=0),
        "lag": dict(lag),
        "span": dict(span),
        "queue_lag": dict(queue_lag),
    }
    if cross_policy:
        figures |= {f"cross_policy.{field.name}": policies[field.name] for field in fields(PolicyCounts)}
    for name in sorted({*ALWAYS_SHOWN, *family.counts}):
        counted = family.counts[name] - counted_before.get(name, 0)
        if counted or name in ALWAYS_SHOWN:
            figures[name] = counted
    return figures


def gauges(gate: StalenessGate) -> dict[str, Any]:
    """How shares and prompts stand after a batch, ``<figure>/<family>``: only for what is configured."""
    figures: dict[str, Any] = {}
    for name, family in gate.families.items():
        if gate.config.share_window is not None:
            figures[f"owed_groups/{name}"] = gate.shares.families[name].owed
        if gate.curriculum is not None:
            figures[f"success_so_far/{name}"] = family.success.success_rate
        if family.config.num_prompts is None:
            continue
        figures[f"prompt_epoch/{name}"] = family.prompts.epoch
        if gate.curriculum is not None:
            figures[f"left_out_prompts/{name}"] = sum(
                not gate.curriculum.plays(name, prompt, record, family.prompts.epoch)
                for prompt, record in family.prompts.records.items()
            )
    return figures
