"""Rows: what is refused before it can reach the weights. Also the builder of rows that the other training tests use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tasks.training.row import TrainingRow, TurnSpan

VOCABULARY = 40


def make_row(
    index: int,
    *,
    length: int = 12,
    trained: tuple[int, ...] = (5, 6, 7),
    reward: float | None = 1.0,
    family: str = "maze",
    group: str = "maze-0",
    version: int = 0,
    temperature: float = 1.0,
    logprob: float = -3.0,
    truncated: bool = False,
    rollout: str | None = None,
) -> TrainingRow:
    """A row of random tokens, sampled at the positions ``trained`` under one version."""
    rng = np.random.default_rng(1000 + index)
    mask = np.zeros(length, np.bool_)
    mask[list(trained)] = True
    return TrainingRow(
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, logprob, 0.0).astype(np.float32),
        token_versions=np.where(mask, version, -1).astype(np.int32),
        temperature=temperature,
        reward=reward,
        family=family,
        group_id=group,
        rollout_id=rollout or f"{group}-{index}",
        trajectory_id=f"{group}/{index}",
        truncated=truncated,
    )


def test_good_rows_pass_and_know_their_oldest_version() -> None:
    row = make_row(0, version=3)
    row.validate(version=3, vocabulary_size=VOCABULARY)
    assert row.oldest_version == 3
    assert make_row(0, trained=()).oldest_version is None


def test_m15_one_logprob_too_few_is_refused() -> None:
    """M15: stored log-probabilities that do not fit the ids raise; nothing is padded, nothing encoded again."""
    row = make_row(0)
    with pytest.raises(ValueError, match=r"trajectory maze-0/0 \(maze\): behaviour_logprobs has shape \(11,\)"):
        replace(row, behaviour_logprobs=row.behaviour_logprobs[:-1]).validate(version=0, vocabulary_size=VOCABULARY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"reward": 1e39}, r"reward is 1e\+39; a reward is finite, and at most 1e\+18 in size"),
        ({"reward_components": {"x": -1e39}}, r"component 'x' is -1e\+39; a reward is finite"),
        ({"turns": (TurnSpan(0, 5, 8, 1e39),)}, r"reward of turn 0 is 1e\+39; a reward is finite"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"behaviour_logprobs": np.full(12, np.nan, np.float32)}, "not all finite"),
        ({"behaviour_logprobs": np.full(12, 0.5, np.float32)}, "at most 0"),
        ({"token_ids": np.full(12, VOCABULARY, np.int32)}, "vocabulary holds 0 to 39"),
        ({"token_ids": np.full(12, -1, np.int32)}, "reach from -1"),
        ({"token_versions": np.full(12, 1, np.int32)}, "the learner holds version 0"),
        ({"token_versions": np.full(12, -1, np.int32)}, "carry a version"),
        ({"loss_mask": np.ones(12, np.bool_)}, "a prompt is missing"),
    ],
)
def test_bad_rows_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        replace(make_row(0), **changes).validate(version=0, vocabulary_size=VOCABULARY)
    assert "maze-0/0" in str(caught.value)


def test_m23_rows_without_a_sampled_token_are_fine() -> None:
    """M23: a prompt that already fills the context, and even an empty row, are rows with nothing to train."""
    make_row(0, trained=()).validate(version=0, vocabulary_size=VOCABULARY)
    make_row(0, length=0, trained=()).validate(version=0, vocabulary_size=VOCABULARY)
