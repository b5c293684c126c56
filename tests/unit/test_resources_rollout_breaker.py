"""The circuit breaker of a task family: closed, open, half-open, and back."""

from __future__ import annotations

from resources.rollout.breaker import BreakerState, FamilyBreaker


def breaker(threshold: int = 3) -> FamilyBreaker:
    return FamilyBreaker(threshold=threshold, first_pause_s=1.0, longest_pause_s=10.0)


def opened() -> FamilyBreaker:
    of_family = breaker()
    for number in range(3):
        assert of_family.num_allowed(0.0) is None
        of_family.ended(f"t{number}", True, f"timeout {number}", 0.0)
    return of_family


def test_failures_in_a_row_open_it():
    of_family = opened()
    assert of_family.state is BreakerState.OPEN and of_family.num_allowed(0.9) == 0
    assert of_family.due_in_s(0.4) == 0.6
    assert of_family.stats() == {
        "state": "open",
        "failures_in_a_row": 3,
        "num_failures": 3,
        "num_openings": 1,
        "last_failure": "timeout 2",
    }


def test_a_success_in_between_counts_anew():
    of_family = breaker()
    for failed in (True, True, False, True, True):
        of_family.ended("t", failed, "", 0.0)
    assert of_family.state is BreakerState.CLOSED and of_family.num_failures == 4


def test_after_its_pause_one_probe_is_let_through_and_closes_it():
    of_family = opened()
    assert of_family.num_allowed(1.0) == 1
    of_family.started("probe", 1.0)
    assert of_family.state is BreakerState.HALF_OPEN and of_family.num_allowed(5.0) == 0
    of_family.ended("probe", False, "", 5.0)
    assert of_family.state is BreakerState.CLOSED and of_family.num_allowed(5.0) is None
    assert of_family.failures_in_a_row == 0


def test_a_probe_that_fails_opens_it_again_for_twice_as_long():
    of_family, now, pauses = opened(), 0.0, []
    for _ in range(6):
        pause = of_family.due_in_s(now)
        assert pause is not None
        pauses.append(pause)
        now += pause
        of_family.num_allowed(now)
        of_family.started("probe", now)
        of_family.ended("probe", True, "still", now)
    assert pauses == [1, 2, 4, 8, 10, 10]
    assert of_family.num_openings == 7


def test_late_failures_of_others_do_not_decide():
    of_family = opened()
    of_family.ended("late", True, "", 0.5)
    assert of_family.num_openings == 1, "already open"
    of_family.num_allowed(1.0)
    of_family.started("probe", 1.0)
    of_family.ended("later", True, "", 1.5)
    assert of_family.state is BreakerState.HALF_OPEN and of_family.num_allowed(1.5) == 0


def test_a_late_success_closes_it():
    of_family = opened()
    of_family.ended("late", False, "", 0.5)
    assert of_family.state is BreakerState.CLOSED


def test_a_probe_that_was_withdrawn_makes_room_for_another_one():
    of_family = opened()
    of_family.num_allowed(1.0)
    of_family.started("probe", 1.0)
    of_family.withdrawn("other")
    assert of_family.num_allowed(2.0) == 0
    of_family.withdrawn("probe")
    assert of_family.num_allowed(2.0) == 1


def test_the_pause_starts_over_after_it_was_closed():
    of_family = opened()
    of_family.num_allowed(1.0)
    of_family.started("probe", 1.0)
    of_family.ended("probe", True, "", 1.0)
    of_family.ended("late", False, "", 2.0)
    for _ in range(3):
        of_family.ended("t", True, "", 10.0)
    assert of_family.due_in_s(10.0) == 1.0
