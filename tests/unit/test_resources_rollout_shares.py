"""How many groups of each family a batch holds: exact quotas, windows, debts, resumes."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resources.rollout.shares import Shares


def taken_from(shares: Shares, **complete: int) -> dict[str, int] | None:
    taken = shares.allot(complete)
    if taken is not None:
        shares.take(taken)
    return taken


def test_without_a_window_every_batch_holds_its_quotas_and_waits():
    shares = Shares({"fast": 4, "slow": 4})
    assert taken_from(shares, fast=20, slow=3) is None
    assert taken_from(shares, fast=20, slow=4) == {"fast": 4, "slow": 4}


def test_a_late_family_is_owed_what_it_misses_and_gets_it_back():
    shares = Shares({"fast": 4, "slow": 4}, window=3)
    assert taken_from(shares, fast=8, slow=3) == {"fast": 5, "slow": 3}
    assert (shares.families["slow"].owed, shares.families["fast"].owed) == (1, -1)
    assert (shares.wanted("slow"), shares.wanted("fast")) == (5, 3)
    assert taken_from(shares, fast=8, slow=9) == {"fast": 3, "slow": 5}
    assert shares.families["slow"].owed == shares.families["fast"].owed == 0


def test_two_groups_late_is_too_late_for_a_slack_of_one():
    shares = Shares({"fast": 4, "slow": 4}, window=3)
    assert taken_from(shares, fast=20, slow=2) is None


def test_a_batch_waits_when_nobody_can_fill_the_place():
    shares = Shares({"fast": 4, "slow": 4}, window=3)
    assert taken_from(shares, fast=4, slow=3) is None
    shares = Shares({"fast": 1, "slow": 4}, window=3)
    assert taken_from(shares, fast=9, slow=3) is None, "one group a batch can be neither late nor ahead"


def test_what_was_missed_is_made_good_within_the_window():
    """Always one group late: every third batch waits for it."""
    shares = Shares({"fast": 4, "slow": 4}, window=3)
    assert taken_from(shares, fast=9, slow=3) == {"fast": 5, "slow": 3}
    assert taken_from(shares, fast=9, slow=4) == {"fast": 4, "slow": 4}, "still one late"
    assert taken_from(shares, fast=9, slow=4) is None
    assert taken_from(shares, fast=9, slow=5) == {"fast": 3, "slow": 5}


def test_who_was_ahead_a_window_ago_cannot_be_late_now():
    """Both within one window would make two groups of difference."""
    shares = Shares({"a": 4, "b": 4}, window=2)
    assert taken_from(shares, a=9, b=3) == {"a": 5, "b": 3}
    assert taken_from(shares, a=9, b=9) == {"a": 3, "b": 5}
    assert taken_from(shares, a=3, b=9) is None, "3 + 3 groups in two batches would be two short of 8"
    assert taken_from(shares, a=4, b=9) == {"a": 4, "b": 4}
    assert taken_from(shares, a=3, b=9) == {"a": 3, "b": 5}, "two batches ago nothing was owed"


def test_the_batch_that_is_taken_back_is_owed_again():
    shares = Shares({"fast": 4, "slow": 4}, window=3)
    taken_from(shares, fast=8, slow=4)
    before = json.loads(json.dumps(shares.snapshot()))
    taken = taken_from(shares, fast=8, slow=3)
    assert taken is not None
    state = json.loads(json.dumps(shares.snapshot()))
    trained, untrained = (Shares({"fast": 4, "slow": 4}, window=3) for _ in range(2))
    trained.restore(state, 2, taken)
    assert (trained.next_batch, trained.families["slow"].owed) == (2, 1)
    untrained.restore(state, 1, taken)
    assert untrained.snapshot()["families"] == before["families"]
    assert untrained.allot({"fast": 8, "slow": 3}) == taken


def test_batches_trained_elsewhere_count_as_their_quotas():
    shares = Shares({"a": 2, "b": 3})
    shares.pass_by(7)
    assert (shares.families["a"].trained, shares.families["b"].trained) == (14, 21)
    assert shares.planned("a", 9) == 18 and shares.planned("a", 3) == 14


def test_quotas_that_move_are_fixed_for_the_batches_that_may_be_worked_on():
    shares = Shares({"a": 2, "b": 4}, window=2)
    shares.fix(1, {"a": 2, "b": 4})
    shares.fix(2, {"a": 4, "b": 2})
    assert [shares.quota("a", batch) for batch in range(5)] == [2, 2, 4, 4, 4]
    assert shares.planned("a", 4) == 12
    for _ in range(2):
        assert taken_from(shares, a=9, b=9) == {"a": 2, "b": 4}
    assert taken_from(shares, a=9, b=9) == {"a": 4, "b": 2}


def test_a_family_ahead_whose_quota_is_cut_gives_back_as_soon_as_it_can():
    shares = Shares({"a": 4, "b": 4}, window=4, slack=3)
    shares.fix(0, {"a": 4, "b": 4})
    shares.fix(1, {"a": 1, "b": 7})
    assert taken_from(shares, a=9, b=2) == {"a": 6, "b": 2}
    assert taken_from(shares, a=9, b=9) == {"a": 1, "b": 9}, "one of each at least: two more than the quotas in all"
    assert (shares.families["a"].owed, shares.families["b"].owed) == (-2, 0)


@pytest.mark.parametrize("slack", [1, 2])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), window=st.integers(2, 4), quotas=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_shares_over_every_window_and_no_starvation(slack, data, window, quotas):
    """Families of any speed. Where the rules refuse a batch, waiting for what is owed always lets it go."""
    names = [f"f{index}" for index in range(len(quotas))]
    quota = dict(zip(names, quotas, strict=True))
    shares = Shares(quota, window=window, slack=slack)
    complete = dict.fromkeys(names, 0)
    batches: list[dict[str, int]] = []
    for _ in range(12):
        for name in names:
            complete[name] += data.draw(st.integers(0, quota[name] + 2))
        taken = shares.allot(complete)
        if taken is None:
            lacking = {name: max(complete[name], shares.wanted(name)) for name in names}
            complete = lacking
            taken = shares.allot(complete)
            assert taken == {name: shares.wanted(name) for name in names}, "paying everything back is always allowed"
        assert sum(taken.values()) == sum(quotas)
        assert all(1 <= taken[name] <= complete[name] for name in names)
        shares.take(taken)
        complete = {name: complete[name] - taken[name] for name in names}
        batches.append(taken)
        if len(batches) >= window:
            for name in names:
                trained = sum(batch[name] for batch in batches[-window:])
                assert abs(trained - window * quota[name]) <= min(slack, quota[name] - 1)
    for name in names:
        assert abs(sum(batch[name] for batch in batches) - 12 * quota[name]) <= slack, "no share drifts away"
