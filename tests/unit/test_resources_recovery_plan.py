"""What becomes of lost actors (pure): who is built where, who is done without, and when a run ends."""

from __future__ import annotations

import pytest

from resources.recovery.config import RecoveryConfig
from resources.recovery.plan import Build, GiveUp, GoOnWithout, RecoveryPlan, Seat

CONTROL = Seat("control", "control", ("control",))
LEARNER = Seat("learner", "learner", ("learner",))
COMPUTE = Seat("engine-compute-0", "engine", ("compute",), ("engine-bandwidth-0",))
BANDWIDTH = Seat("engine-bandwidth-0", "engine", ("bandwidth",))
ROLLOUTS = [Seat(f"rollout-{i}", "environment", ("cpu",), (f"rollout-{1 - i}",)) for i in range(2)]
SEATS = {CONTROL: "w-control", LEARNER: "w-learner", COMPUTE: "w-compute", BANDWIDTH: "w-bandwidth"} | {
    seat: f"w-cpu-{i}" for i, seat in enumerate(ROLLOUTS)
}
WORKERS = {
    "control": ["w-control"],
    "learner": ["w-learner"],
    "compute": ["w-compute"],
    "bandwidth": ["w-bandwidth"],
    "cpu": ["w-cpu-0", "w-cpu-1"],
}


def plan(**settings) -> RecoveryPlan:
    return RecoveryPlan(
        SEATS, RecoveryConfig(**{"max_restarts": 2, "restart_window_s": 100, "replacement_wait_s": 30, **settings})
    )


def without(*addresses: str) -> dict[str, list[str]]:
    return {name: [each for each in members if each not in addresses] for name, members in WORKERS.items()}


def reason(decisions) -> str:
    (decision,) = decisions
    assert isinstance(decision, GiveUp | GoOnWithout)
    return decision.reason


def test_a_lost_actor_is_built_on_the_worker_that_took_the_place_of_its_own():
    recovery = plan()
    assert recovery.lost("learner", "gone", 0.0) == []
    assert recovery.look(without("w-learner"), 1.0) == []
    assert recovery.look({**WORKERS, "learner": ["w-learner-new"]}, 2.0) == [Build(LEARNER, "w-learner-new")]
    recovery.built("learner")
    assert not recovery.has_gaps and recovery.restarts == {"learner": 1} and recovery.failure is None


def test_a_worker_that_hosts_another_actor_of_the_role_is_not_free():
    recovery = plan()
    recovery.lost("rollout-0", "gone", 0.0)
    assert recovery.look(without("w-cpu-0"), 1.0) == [], "w-cpu-1 hosts rollout-1"
    recovery.lost("rollout-1", "gone", 1.0)
    assert recovery.look({**WORKERS, "cpu": ["a", "b"]}, 2.0) == [Build(ROLLOUTS[0], "a"), Build(ROLLOUTS[1], "b")]


def test_one_worker_may_host_actors_of_several_roles():
    recovery = plan()
    recovery.lost("learner", "gone", 0.0)
    assert recovery.look({**WORKERS, "learner": ["w-compute"]}, 1.0) == [Build(LEARNER, "w-compute")]


def test_the_group_queue_is_not_rebuilt():
    recovery = plan()
    assert "cannot be rebuilt; resume the run behind its last recorded iteration (--resume)" in reason(
        recovery.lost("control", "actor control was lost", 0.0)
    )
    assert recovery.failure is not None and recovery.failure.startswith("actor control was lost")
    assert recovery.lost("learner", "gone", 1.0) == [], "one reason is enough"


def test_restarts_of_a_role_are_bounded_within_a_window():
    recovery = plan()
    for now in (0.0, 10.0):
        recovery.lost("learner", "gone", now)
        assert recovery.look(WORKERS, now) == [Build(LEARNER, "w-learner")]
        recovery.built("learner")
    recovery.lost("engine-compute-0", "gone", 20.0)
    assert recovery.failure is None, "other roles have a budget of their own"
    message = reason(recovery.lost("learner", "actor learner was lost", 50.0))
    assert message.startswith("actor learner was lost. Actors of role learner were rebuilt 2 times within 100 s")
    assert "recovery.max_restarts (2)" in message


def test_old_restarts_are_forgiven():
    recovery = plan()
    for now in (0.0, 60.0, 120.0, 180.0):
        recovery.lost("learner", "gone", now)
        recovery.look(WORKERS, now)
        recovery.built("learner")
    assert recovery.failure is None and recovery.restarts["learner"] == 4


def test_a_constructor_that_fails_again_and_again_ends_the_run():
    recovery = plan()
    recovery.lost("engine-bandwidth-0", "gone", 0.0)
    assert recovery.look(WORKERS, 0.0) == [Build(BANDWIDTH, "w-bandwidth")]
    assert recovery.lost("engine-bandwidth-0", "could not be built", 1.0) == []
    assert recovery.look(WORKERS, 1.0) == [Build(BANDWIDTH, "w-bandwidth")]
    assert "could not be built" in reason(recovery.lost("engine-bandwidth-0", "could not be built", 2.0))


def test_a_class_without_workers_is_done_without_while_another_stands_in():
    """S20: a fallback within a bounded time, and said."""
    recovery = plan()
    recovery.lost("engine-compute-0", "gone", 0.0)
    assert recovery.look(without("w-compute"), 29.0) == []
    message = reason(recovery.look(without("w-compute"), 30.0))
    assert "No worker of class 'compute' came to host engine-compute-0 within 30 s" in message
    assert "engine-bandwidth-0 stand in for it" in message
    assert recovery.look(without("w-compute"), 90.0) == [], "it is said once"
    assert recovery.look(WORKERS, 100.0) == [Build(COMPUTE, "w-compute")], "and built as soon as a worker comes"


@pytest.mark.parametrize("name", ["engine-bandwidth-0", "learner"])
def test_a_class_without_workers_and_stand_ins_ends_the_run(name):
    """S20: an error within a bounded time."""
    recovery = plan()
    recovery.lost(name, f"actor {name} was lost", 0.0)
    assert recovery.look(without("w-bandwidth", "w-learner"), 29.0) == []
    message = reason(recovery.look(without("w-bandwidth", "w-learner"), 31.0))
    assert message.startswith(f"actor {name} was lost. No worker of class") and "nothing stands in for it" in message
    assert recovery.failure == message


def test_what_is_being_built_does_not_stand_in():
    recovery = plan()
    recovery.lost("rollout-0", "gone", 0.0)
    recovery.lost("rollout-1", "gone", 25.0)
    assert recovery.look({**WORKERS, "cpu": ["new"]}, 26.0) == [Build(ROLLOUTS[0], "new")]
    assert "nothing stands in" in reason(recovery.look({**WORKERS, "cpu": ["new"]}, 56.0))


def test_without_restarts_the_first_loss_ends_the_run():
    assert "max_restarts (0)" in reason(plan(max_restarts=0).lost("learner", "gone", 0.0))
