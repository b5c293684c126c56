"""A trajectory as played: the unit that rollouts produce, one row of the store (schema version 2)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from resources.environments.base import Message
from resources.failures import FailureClass

Termination = Literal[
    "terminated", "max_turns", "max_tokens", "timeout", "env_error", "engine_error",
    "evicted_stale", "cancelled_redundant", "preempted",
]  # fmt: skip


@dataclass(slots=True)
class Turn:
    """One generation and the environment's answer to it. Positions index the trajectory's token lists."""

    observation_start: int
    action_start: int
    action_end: int
    engine: str = ""
    hardware_class: str = ""
    finish_reason: str = ""
    reward: float = 0.0
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    environment_s: float = 0.0
    tool_name: str | None = None
    invalid_action: bool = False
    error: str | None = None


@dataclass(slots=True)
class Trajectory:
    """One append-only token sequence, or several laid one behind the other. The four token arrays have one length T."""

    run_id: str
    trajectory_id: str
    rollout_id: str
    """Rows of one conversation share it and count once in group statistics (equal to trajectory_id for single rows)."""
    attempt: int
    family: str
    env_id: str
    env_version: str
    group_id: str
    member: int
    group_size: int
    seed_env: int
    seed_sampling: int
    split: Literal["train", "eval"]
    temperature: float
    top_p: float
    top_k: int
    tokenizer_hash: str
    template_hash: str
    token_ids: np.ndarray
    """int32 [T]"""
    loss_mask: np.ndarray
    """bool [T]: sampled by the policy."""
    behaviour_logprobs: np.ndarray
    """float32 [T]: 0 where the mask is false."""
    token_versions: np.ndarray
    """int32 [T]: policy version of each sampled token, -1 where the mask is false."""
    prompt_length: int
    turns: list[Turn]
    reward: float | None
    """Inline reward; None when the reward pool judges, or when the trajectory is unscored."""
    reward_components: dict[str, float]
    success: bool | None
    termination: Termination
    truncated: bool
    """The episode was cut (turn limit, token limit, context), not ended by the task."""
    failure_class: FailureClass | None = None
    failure_message: str = ""
    scorer: str = "environment"
    scorer_version: str = "1"
    messages: list[Message] = field(default_factory=list)
    final_state: str = ""
    submitted_at: float = 0.0
    """Unix seconds."""
    started_at: float = 0.0
    finished_at: float = 0.0
    reset_s: float = 0.0
    environment_s: float = 0.0
    generation_s: float = 0.0
    sequence_starts: list[int] = field(default_factory=list)
    """Positions, after 0, where a new token sequence begins: the chat template rewrote the history there
    (`RolloutConfig.history`), and what follows was sampled after the history as rewritten. Each is the
    ``observation_start`` of a turn, or lies behind the last action."""

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """[start, end) of each token sequence; a sampled token lies in one of them."""
        return list(itertools.pairwise([0, *self.sequence_starts, len(self.token_ids)]))

    @property
    def oldest_version(self) -> int | None:
        """Oldest version among the sampled tokens; None without any."""
        sampled = self.token_versions[self.loss_mask]
        return int(sampled.min()) if sampled.size else None

    @property
    def newest_version(self) -> int | None:
        sampled = self.token_versions[self.loss_mask]
        return int(sampled.max()) if sampled.size else None

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class TrajectoryRef:
    """Where a row lies: the key of a sealed trajectory file in the run's store, and the row in it."""

    file: str
    row: int
