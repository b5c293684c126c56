"""Which losses can a run outlive?"""

from __future__ import annotations

import pytest

from flows.plane import Plane
from resources.failures import InfrastructureFailure
from resources.pools.actors import ActorHandle
from resources.pools.liveness import LossWatch
from resources.pools.registry import RunActors


def handle(name: str) -> ActorHandle:
    return ActorHandle(name, "Actor", f"{name}-key", "tcp://10.0.0.1:1", "tcp://10.0.0.1:2")


@pytest.fixture
def plane() -> Plane:
    actors = RunActors(
        "run",
        {"compute": (handle("engine-compute-0"),)},
        handle("learner"),
        handle("control"),
        (handle("rollout-0"), handle("rollout-1")),
    )
    return Plane(actors, LossWatch(actors.handles()))


def lose(plane: Plane, *names: str) -> None:
    plane.watch.lost.update({name: f"actor {name} was lost" for name in names})


def test_a_run_plays_on_with_the_rollout_workers_that_are_left(plane: Plane) -> None:
    plane.check()
    lose(plane, "rollout-0")
    plane.check()
    lose(plane, "rollout-1")
    with pytest.raises(InfrastructureFailure, match="rollout-0 was lost; actor rollout-1 was lost"):
        plane.check()


@pytest.mark.parametrize("name", ["learner", "control", "engine-compute-0"])
def test_a_run_ends_without_learner_queue_or_engine(plane: Plane, name: str) -> None:
    lose(plane, name)
    with pytest.raises(InfrastructureFailure, match=f"{name} was lost"):
        plane.check()
