"""Seeds are stable, distinct, and split into two ranges."""

from __future__ import annotations

from typing import Any

import pytest

from resources.environments.seeds import EVAL_SEEDS_FROM, episode_seed, sampling_seed, split_of

# Kept seeds: a change of the hash would give old run files other episodes.
FROZEN_TRAIN = 747150974633162661
FROZEN_EVAL = 4869000809332954506
FROZEN_SAMPLING = 2014901829420715505


def test_seven_with_a_group_of_four_and_two_engines_gives_eight_seeds() -> None:
    """M21: seed 7, group of 4, 2 engines -> 8 distinct sampling seeds, reproducible."""
    seeds = [sampling_seed(7, "lake-000000", member, 0, engine) for member in range(4) for engine in range(2)]
    assert len(set(seeds)) == 8
    assert seeds == [sampling_seed(7, "lake-000000", member, 0, engine) for member in range(4) for engine in range(2)]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sampling_seeds_differ_by_group_member_attempt_and_run() -> None:
    seeds = [
        sampling_seed(run, group, member, attempt)
        for run in range(3)
        for group in ("a-000000", "a-000001", "b-000000")
        for member in range(8)
        for attempt in range(3)
    ]
    assert len(set(seeds)) == len(seeds)


def test_episode_seeds_are_distinct_and_the_splits_disjoint() -> None:
    train = [episode_seed(run, family, i, "train") for run in (0, 1) for family in ("a", "b") for i in range(500)]
    held_out = [episode_seed(run, family, i, "eval") for run in (0, 1) for family in ("a", "b") for i in range(500)]
    assert len({*train, *held_out}) == 4000
    assert max(train) < EVAL_SEEDS_FROM <= min(held_out) and max(held_out) < 2**63
    assert {split_of(seed) for seed in train} == {"train"} and {split_of(seed) for seed in held_out} == {"eval"}


def test_seeds_are_the_same_in_every_process_and_release() -> None:
    assert episode_seed(0, "frozen_lake", 0, "train") == FROZEN_TRAIN
    assert episode_seed(0, "frozen_lake", 0, "eval") == FROZEN_EVAL
    assert sampling_seed(7, "lake-000000", 0, 0) == FROZEN_SAMPLING


def test_an_unknown_split_is_refused() -> None:
    unknown: Any = "test"
    with pytest.raises(ValueError, match="split is 'test'; it must be 'train' or 'eval'"):
        episode_seed(0, "a", 0, unknown)
