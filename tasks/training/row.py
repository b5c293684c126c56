"""What the learner trains on: one row per append-only token sequence, with its final reward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

HIGHEST_LOGPROB = 1e-3
"""Rounding may lift a log-probability of 0 a little; anything above this is no log-probability."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One token sequence. The four arrays have one length T."""

    token_ids: np.ndarray
    """int32 [T]: exactly the ids that were sampled or read; nothing is ever encoded again."""
    loss_mask: np.ndarray
    """bool [T]: sampled by the policy."""
    behaviour_logprobs: np.ndarray
    """float32 [T]: of the engine that sampled, after temperature; read where the mask is true only."""
    token_versions: np.ndarray
    """int32 [T]: policy version under which each token was sampled, -1 where the mask is false."""
    temperature: float
    """The logits were divided by it when the row was sampled."""
    reward: float | None
    """Final reward. None: unscored, out of every statistic."""
    family: str
    group_id: str
    rollout_id: str
    """Rows of one conversation share it, and count once in the statistics of their group."""
    trajectory_id: str
    truncated: bool = False
    """Cut by a limit, not ended by the task."""

    def validate(self, *, version: int, vocabulary_size: int) -> None:
        """Refuse a row that cannot be trained on as it is.

        Raises:
            ValueError: naming the trajectory and what is wrong with it.
        """
        where = f"trajectory {self.trajectory_id} ({self.family})"
        shape = (len(self.token_ids),)
        for name in ("token_ids", "loss_mask", "behaviour_logprobs", "token_versions"):
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"{where}: {name} has shape {getattr(self, name).shape}, token_ids {shape}; the arrays of a row "
                    "must have one length (never pad, never encode the text again: store the sampled ids and logprobs)"
                )
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(
                f"{where}: reward is {self.reward}; a reward is finite, or None for an unscored trajectory"
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"{where}: temperature is {self.temperature}; it must be above 0")
        if not shape[0]:
            return
        if self.loss_mask[0]:
            raise ValueError(
                f"{where}: its first token is marked as sampled, but nothing precedes it; a prompt is missing"
            )
        lowest, highest = int(self.token_ids.min()), int(self.token_ids.max())
        if lowest < 0 or highest >= vocabulary_size:
            raise ValueError(
                f"{where}: token ids reach from {lowest} to {highest}, the model's vocabulary holds 0 to "
                f"{vocabulary_size - 1}; engine and learner must load the same model directory"
            )
        logprobs = self.behaviour_logprobs[self.loss_mask]
        if logprobs.size and not (np.isfinite(logprobs).all() and logprobs.max() <= HIGHEST_LOGPROB):
            raise ValueError(
                f"{where}: behaviour_logprobs of sampled tokens are not all finite and at most 0 "
                f"(min {logprobs.min()}, max {logprobs.max()})"
            )
        versions = self.token_versions[self.loss_mask]
        if versions.size and (int(versions.min()) < 0 or int(versions.max()) > version):
            raise ValueError(
                f"{where}: sampled under versions {int(versions.min())} to {int(versions.max())}, but the learner "
                f"holds version {version}; sampled tokens carry a version from 0 to that"
            )

    @property
    def oldest_version(self) -> int | None:
        """Oldest version among the sampled tokens; None without any."""
        sampled = self.token_versions[self.loss_mask]
        return int(sampled.min()) if sampled.size else None
