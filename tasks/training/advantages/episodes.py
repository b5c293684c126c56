"""A rollout as the sequence of its turns, with what each of them earned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.training.advantages.base import AdvantageInputs
from tasks.training.row import TrainingRow, TurnSpan


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    row: int
    """Index of the row in which the turn lies."""
    span: TurnSpan
    reward: float
    """Its inline reward less the penalties on its tokens; the last turn of an episode also gets what the final reward
    holds beyond all inline ones (a verdict at the end), so that the rewards of an episode add up to the final one."""


def episode_turns(
    inputs: AdvantageInputs, indices: Sequence[int], final_reward: float, estimator: str
) -> list[EpisodeTurn]:
    """The turns of a rollout whose rows are ``indices``, in order; [] if no row has a turn or a sampled token.

    Raises:
        ValueError: naming the trajectory, when a row with sampled tokens does not know its turns.
    """
    turns: list[EpisodeTurn] = []
    for index in indices:
        row = inputs.rows[index]
        if not row.turns and row.loss_mask.any():
            raise ValueError(
                f"trajectory {row.trajectory_id} ({row.family}): its turns are not known, and {estimator} works by "
                "turn; hand over rows with turns, or choose an estimator of whole episodes such as grpo"
            )
        for span in row.turns:
            turns.append(EpisodeTurn(index, span, span.reward - _penalty(inputs, index, span)))
    if turns:
        rest = final_reward - sum(turn.span.reward for turn in turns)
        last = turns[-1]
        turns[-1] = EpisodeTurn(last.row, last.span, last.reward + rest)
    return turns


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return to go of each step: r_t + discount * r_(t+1) + ..."""
    returns = [0.0] * len(rewards)
    later = 0.0
    for step in range(len(rewards) - 1, -1, -1):
        later = rewards[step] + discount * later
        returns[step] = later
    return returns


def observation_of(row: TrainingRow, span: TurnSpan) -> bytes:
    """What the policy read before this action, as a key: equal exactly when the token ids are."""
    return np.ascontiguousarray(row.token_ids[span.observation_start : span.action_start], dtype=np.int32).tobytes()


def _penalty(inputs: AdvantageInputs, index: int, span: TurnSpan) -> float:
    if inputs.penalty_RT is None:
        return 0.0
    return float(inputs.penalty_RT[index][span.action_start : span.action_end].sum(dtype=np.float64))
