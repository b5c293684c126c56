"""What the learner trains on: one row per append-only token sequence, with its final reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from resources.rewards.checked import HIGHEST_REWARD, is_reward

HIGHEST_LOGPROB = 1e-3
"""Rounding may lift a log-probability of 0 a little; anything above this is no log-probability."""

_REWARD = f"a reward is finite, and at most {HIGHEST_REWARD:g} in size"


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """One generation and what it was an answer to; positions index the row's arrays."""

    observation_start: int
    """The tokens from here to ``action_start`` are what the policy read since its last action."""
    action_start: int
    action_end: int
    """The generation is the tokens from ``action_start`` up to, not including, this one."""
    reward: float = 0.0
    """Inline reward of the step that this action made."""


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
    turns: tuple[TurnSpan, ...] = ()
    """In order. Empty: not known; estimators that work by turn then refuse the row."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the final reward, where its scorer tells them."""

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
        if self.reward is not None and not is_reward(self.reward):
            raise ValueError(f"{where}: reward is {self.reward}; {_REWARD}, or None for an unscored trajectory")
        for name, value in self.reward_components.items():
            if not is_reward(value):
                raise ValueError(f"{where}: reward component {name!r} is {value}; {_REWARD}")
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
                f"(min {logprobs.min()}, max {logprobs.max()}); the engine must give the log-probability of every "
                "token that it samples"
            )
        versions = self.token_versions[self.loss_mask]
        if versions.size and (int(versions.min()) < 0 or int(versions.max()) > version):
            raise ValueError(
                f"{where}: sampled under versions {int(versions.min())} to {int(versions.max())}, but the learner "
                f"holds version {version}; sampled tokens carry a version from 0 to that"
            )

        self._validate_turns(where)

    def _validate_turns(self, where: str) -> None:
        end = 0
        in_turns = np.zeros(len(self.token_ids), np.bool_)
        for number, turn in enumerate(self.turns):
            if not end <= turn.observation_start <= turn.action_start <= turn.action_end <= len(self.token_ids):
                raise ValueError(
                    f"{where}: turn {number} spans {turn.observation_start}, {turn.action_start}, {turn.action_end} "
                    f"behind {end} of {len(self.token_ids)} tokens; turns lie in order and do not overlap"
                )
            if not is_reward(turn.reward):
                raise ValueError(f"{where}: reward of turn {number} is {turn.reward}; {_REWARD}")
            in_turns[turn.action_start : turn.action_end] = True
            end = turn.action_end
        if self.turns and (self.loss_mask & ~in_turns).any():
            raise ValueError(f"{where}: a sampled token lies in no turn; turns must cover every sampled token")

    @property
    def oldest_version(self) -> int | None:
        """Oldest version among the sampled tokens; None without any."""
        sampled = self.token_versions[self.loss_mask]
        return int(sampled.min()) if sampled.size else None
