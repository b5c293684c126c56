"""What an update measured, under the names that people look for. Flat names, ``/`` between part and quantity."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tasks.training.advantages.base import Advantages
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.losses.ratios import k3
from tasks.training.masks import TrainingMasks
from tasks.training.row import TrainingRow


def batch_metrics(
    rows: Sequence[TrainingRow], advantages: Advantages, masks: TrainingMasks, version: int
) -> dict[str, Any]:
    """What is known before the first step: rewards, advantages, dead groups, masked tokens, staleness. A rollout counts
    once, however many rows it has."""
    rewards: defaultdict[str, dict[str, float]] = defaultdict(dict)
    trajectories: defaultdict[str, set[str]] = defaultdict(set)
    trained: Counter[str] = Counter()
    cut: set[str] = set()
    oldest: dict[str, int] = {}
    for row, mask in zip(rows, masks.trained_RT, strict=True):
        trajectories[row.family].add(row.rollout_id)
        trained[row.family] += int(mask.sum())
        if row.truncated:
            cut.add(row.rollout_id)
        if row.oldest_version is not None:
            oldest[row.rollout_id] = min(row.oldest_version, oldest.get(row.rollout_id, version))
        if row.reward is not None:
            rewards[row.family][row.rollout_id] = row.reward
    metrics: dict[str, Any] = {}
    for family in sorted(trajectories):
        metrics[f"num_trajectories/{family}"] = len(trajectories[family])
        metrics[f"trained_tokens/{family}"] = trained[family]
        if rewards[family]:
            metrics[f"reward/{family}"] = math.fsum(rewards[family].values()) / len(rewards[family])
        of_family = [
            values[mask]
            for row, values, mask in zip(rows, advantages.values_RT, masks.trained_RT, strict=True)
            if row.family == family
        ]
        if trained[family]:
            metrics[f"advantage/std/{family}"] = float(np.concatenate(of_family).astype(np.float64).std())
        if num_groups := advantages.num_groups.get(family, 0):
            metrics[f"num_groups/{family}"] = num_groups
            metrics[f"dead_group_share/{family}"] = advantages.num_dead_groups.get(family, 0) / num_groups
    if all_rewards := [reward for by_rollout in rewards.values() for reward in by_rollout.values()]:
        metrics["reward/mean"] = math.fsum(all_rewards) / len(all_rewards)
    if num_groups := sum(advantages.num_groups.values()):
        metrics["dead_group_share"] = sum(advantages.num_dead_groups.values()) / num_groups
    if advantages.num_rollouts:
        metrics["unscored_share"] = advantages.num_unscored / advantages.num_rollouts
    metrics["truncated_share"] = len(cut) / max(1, sum(map(len, trajectories.values())))
    values = np.concatenate(
        [values[mask] for values, mask in zip(advantages.values_RT, masks.trained_RT, strict=True)] or [np.zeros(0)]
    )
    if values.size:
        metrics["advantage/mean"] = float(values.mean(dtype=np.float64))
        metrics["advantage/std"] = float(values.std(dtype=np.float64))
        metrics["advantage/max_abs"] = float(np.abs(values).max())
    metrics["tokens/trained"] = sum(trained.values())
    for cause in ("unscored", "dead_group", "truncated", "stale"):
        metrics[f"tokens/masked/{cause}"] = masks.masked_tokens.get(cause, 0)
    if staleness := [version - sampled_under for sampled_under in oldest.values()]:
        metrics["staleness/mean"] = sum(staleness) / len(staleness)
        metrics["staleness/max"] = max(staleness)
    return metrics


class StepSums:
    """Sums over the trained tokens of an update's optimizer steps; kept on the device, read once at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._extrema: dict[str, torch.Tensor] = {}
        self.num_tokens = 0

    def add(self, inputs: LossInputs, losses: TokenLosses, entropy_N: torch.Tensor) -> None:
        """Count one micro-batch. Ignores an empty one."""
        if not losses.ratio_N.numel():
            return
        with torch.no_grad():
            self.num_tokens += losses.ratio_N.numel()
            log_ratio_N = inputs.current_logprobs_N - inputs.behaviour_logprobs_N
            sums = {
                "ratio/mean": losses.ratio_N.sum(),
                "clip_share": losses.clipped_N.float().sum(),
                "approx_kl": k3(log_ratio_N).sum(),
                "entropy": entropy_N.sum(),
                **losses.sums,
            }
            for name, value in sums.items():
                self._sums[name] = self._sums.get(name, 0.0) + value.detach()
                self._counts[name] += losses.counts.get(name, losses.ratio_N.numel())
            lowest, highest = torch.aminmax(losses.ratio_N)
            self._extrema["ratio/min"] = torch.minimum(self._extrema.get("ratio/min", lowest), lowest)
            self._extrema["ratio/max"] = torch.maximum(self._extrema.get("ratio/max", highest), highest)

    def add_means(self, values: Mapping[str, torch.Tensor]) -> None:
        """Further quantities of some tokens, [N] each; reported as means over these."""
        for name, values_N in values.items():
            if values_N.numel():
                self._sums[name] = self._sums.get(name, 0.0) + values_N.sum()
                self._counts[name] += values_N.numel()

    def merge(self, other: StepSums) -> None:
        """Add what another one has counted."""
        self.num_tokens += other.num_tokens
        self._counts.update(other._counts)
        for name, value in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        for name, value in other._extrema.items():
            choose = torch.minimum if name.endswith("/min") else torch.maximum
            self._extrema[name] = choose(self._extrema.get(name, value), value)

    def on_host(self) -> StepSums:
        """A copy whose numbers lie in the host's memory, to be sent to another rank."""
        copy = StepSums()
        copy.num_tokens = self.num_tokens
        copy._counts = Counter(self._counts)
        copy._sums = {name: value.cpu() for name, value in self._sums.items()}
        copy._extrema = {name: value.cpu() for name, value in self._extrema.items()}
        return copy

    def read(self) -> dict[str, float]:
        """Means over tokens and extrema; {} when there was no token."""
        means = {name: float(value) / self._counts[name] for name, value in self._sums.items()}
        return {**means, **{name: float(value) for name, value in self._extrema.items()}}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Learner minus engine log-probabilities of some tokens: how many, the sum and the largest of their magnitudes."""

    num_tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, differences: np.ndarray) -> Mismatch:
        """``differences`` is float32 [N]."""
        magnitude = np.abs(differences)
        return cls(magnitude.size, float(magnitude.sum(dtype=np.float64)), float(magnitude.max(initial=0.0)))

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(self.num_tokens + other.num_tokens, self.total + other.total, max(self.largest, other.largest))


def mismatch_metrics(engine_difference: Mismatch, policy_drift: Mismatch) -> dict[str, float]:
    """Measured before the first optimizer step of the update.

    On tokens of the learner's own version it is the numerical mismatch of the two implementations
    (``engine_difference``); on older tokens it holds what the updates since then changed (``policy_drift``).
    """
    metrics: dict[str, float] = {}
    for name, mismatch in (("engine_difference", engine_difference), ("policy_drift", policy_drift)):
        metrics[f"{name}/num_tokens"] = mismatch.num_tokens
        if mismatch.num_tokens:
            metrics[f"{name}/mean"] = mismatch.total / mismatch.num_tokens
            metrics[f"{name}/max"] = mismatch.largest
    return metrics
