"""What is booked of the policies that sampled a trajectory, turn by turn, against counts by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resources.engines.base import Generation
from resources.rollout.messages import PolicyCounts
from resources.rollout.policy_record import PolicyRecord
from resources.trajectories.trajectory import Turn


def generation(engine: str, versions: Sequence[int], *, stale_tokens: int = 0, cached_tokens: int = 0) -> Generation:
    number = len(versions)
    return Generation(
        "r", "t", np.arange(number, dtype=np.int32), np.zeros(number, np.float32), np.array(versions, np.int32), "stop",
        engine=engine, stale_tokens=stale_tokens, cached_tokens=cached_tokens,
    )  # fmt: skip


def test_the_oldest_version_is_told_when_it_becomes_known_and_when_it_sinks() -> None:
    """An engine that loads in the middle of a turn leaves two versions in it: the older one counts."""
    record = PolicyRecord()
    told = [
        record.note("current", generation("a", versions), None, 0)
        for versions in ([], [5, 5, 6], [5, 6], [7], [4, 7], [4], [5])
    ]
    assert told == [None, 5, None, None, 4, None, None]


def test_turns_and_tokens_are_counted_by_who_sampled_them() -> None:
    record, turn = PolicyRecord(), Turn(0, 3, 9, engine="a")
    record.note("current", generation("a", [3, 3, 3]), None, 0)  # a current turn on a current engine
    record.note("stale", generation("s", [0, 0], stale_tokens=2, cached_tokens=3), turn, 8)  # moved: 5 computed again
    record.note("stale", generation("a", [0, 3, 3], stale_tokens=1, cached_tokens=9), Turn(9, 9, 11, engine="s"), 10)
    record.note("stale", generation("a", [3]), turn, 20)  # no stale engine was there; on the engine of the turn before
    record.note("stale", generation("a", []), turn, 20)  # nothing was sampled
    assert record.counts() == PolicyCounts(
        stale_turns=2, stale_tokens=3, unserved_turns=2, moved_turns=2, prefilled_again_tokens=5 + 1
    )


def test_an_engine_that_happens_to_hold_more_than_the_one_before_computes_nothing_again() -> None:
    record = PolicyRecord()
    record.note("current", generation("b", [1], cached_tokens=12), Turn(0, 3, 9, engine="a"), 8)
    assert record.counts() == PolicyCounts(moved_turns=1)
