"""What a trajectory must be before it is written: rows are immutable, so a wrong one is refused at the door."""

from __future__ import annotations

import math
import typing
from typing import Any

import numpy as np

from resources.trajectories.trajectory import Termination, Trajectory

LOGPROB_TOLERANCE = 1e-3
"""A log-probability above 0 by more than this is no rounding error."""

_TERMINATIONS = typing.get_args(Termination)
_TOKEN_KINDS = {"token_ids": "iu", "loss_mask": "b", "behaviour_logprobs": "f", "token_versions": "iu"}


def check_trajectory(trajectory: Trajectory) -> None:
    """Raises ValueError that names the trajectory, the field, the position, the value and what is allowed.

    Nothing is padded, cut or re-encoded to fit (a log-probability too few is a bug of whoever sampled it).
    """
    problem = (
        _token_problem(trajectory)
        or _turn_problem(trajectory)
        or _sequence_problem(trajectory)
        or _outcome_problem(trajectory)
        or _name_problem(trajectory)
    )
    if problem:
        raise ValueError(f"trajectory {trajectory.trajectory_id!r}: {problem}")


def _token_problem(t: Trajectory) -> str | None:
    arrays: dict[str, np.ndarray] = {name: np.asarray(getattr(t, name)) for name in _TOKEN_KINDS}
    for name, kinds in _TOKEN_KINDS.items():
        array = arrays[name]
        if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
            return f"{name} has shape {array.shape} and type {array.dtype}; allowed is one dimension of kind {kinds!r}"
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        return (
            f"the token lists have lengths {lengths}; they must be equal, one entry per token (never pad or re-encode)"
        )
    num_tokens = lengths["token_ids"]
    if not 0 <= t.prompt_length <= num_tokens:
        return f"prompt_length is {t.prompt_length}; allowed are 0 to {num_tokens}, the number of tokens"
    ids, mask, logprobs, versions = (arrays[name] for name in _TOKEN_KINDS)
    mask = mask.astype(bool)
    limit = np.iinfo(np.int32).max
    return (
        _first(mask & (np.arange(num_tokens) < t.prompt_length), mask, "loss_mask", "false within the prompt")
        or _first((ids < 0) | (ids > limit), ids, "token_ids", f"0 to {limit}")
        or _first(~np.isfinite(logprobs), logprobs, "behaviour_logprobs", "finite numbers")
        or _first(logprobs > LOGPROB_TOLERANCE, logprobs, "behaviour_logprobs", "numbers up to 0")
        or _first(~mask & (logprobs != 0), logprobs, "behaviour_logprobs", "0 where the mask is false")
        or _first(~mask & (versions != -1), versions, "token_versions", "-1 where the mask is false")
        or _first(
            mask & ((versions < 0) | (versions > limit)), versions, "token_versions", "0 or more on sampled tokens"
        )
    )


def _turn_problem(t: Trajectory) -> str | None:
    position = 0
    num_sampled = 0
    mask = np.asarray(t.loss_mask)
    for number, turn in enumerate(t.turns):
        spans = (turn.observation_start, turn.action_start, turn.action_end)
        if not position <= spans[0] <= spans[1] <= spans[2] <= len(t.token_ids):
            return (
                f"turn {number} has observation_start, action_start, action_end {spans}; "
                f"allowed are ascending positions from {position} to {len(t.token_ids)}"
            )
        if not mask[turn.action_start : turn.action_end].all():
            return f"turn {number} sampled positions {spans[1]} to {spans[2]}; loss_mask is not true on all of them"
        position = turn.action_end
        num_sampled += turn.action_end - turn.action_start
    if num_sampled != np.count_nonzero(mask):
        return f"loss_mask is true on {np.count_nonzero(mask)} tokens; the turns' actions cover {num_sampled}"
    return None


def _sequence_problem(t: Trajectory) -> str | None:
    last_action_end = t.turns[-1].action_end if t.turns else t.prompt_length
    observation_starts = {turn.observation_start for turn in t.turns}
    previous = 0
    for start in t.sequence_starts:
        if not previous < start < len(t.token_ids):
            return (
                f"sequence_starts is {t.sequence_starts}; allowed are ascending positions from 1 to "
                f"{len(t.token_ids) - 1}"
            )
        if start not in observation_starts and start < last_action_end:
            return (
                f"sequence_starts holds {start}, where no turn's observation begins (they begin at "
                f"{sorted(observation_starts)}): a sequence begins with what was read, never within an action"
            )
        previous = start
    return None


def _outcome_problem(t: Trajectory) -> str | None:
    numbers: list[tuple[str, Any]] = [("reward_components." + k, v) for k, v in t.reward_components.items()]
    numbers += [(f"turns[{n}].reward", turn.reward) for n, turn in enumerate(t.turns)]
    if t.reward is not None:
        numbers.append(("reward", t.reward))
    for name, value in numbers:
        if not math.isfinite(value):
            return f"{name} is {value}; allowed are finite numbers"
    if t.failure_class is not None and not t.failure_class.is_scored and t.reward is not None:
        return f"reward is {t.reward} beside failure_class {t.failure_class}; what failed so is unscored: reward None"
    return None


def _name_problem(t: Trajectory) -> str | None:
    for name in ("run_id", "trajectory_id", "rollout_id", "family", "group_id"):
        if not getattr(t, name):
            return f"{name} is empty; it is part of the row's identity"
    if t.split not in ("train", "eval"):
        return f"split is {t.split!r}; allowed are 'train' and 'eval'"
    if t.termination not in _TERMINATIONS:
        return f"termination is {t.termination!r}; allowed are {', '.join(_TERMINATIONS)}"
    return None


def _first(wrong: np.ndarray, values: np.ndarray, name: str, allowed: str) -> str | None:
    if not wrong.any():
        return None
    at = int(np.argmax(wrong))
    return f"{name}[{at}] is {values[at]} ({int(wrong.sum())} such); allowed: {allowed}"
