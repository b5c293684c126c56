"""The supervisor between a cluster, a registry and actors that are all written by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.pools.actors import ActorHandle
from resources.pools.registry import RunActors
from resources.recovery.config import RecoveryConfig
from resources.recovery.plan import Seat
from resources.recovery.supervisor import Supervisor
from resources.recovery.whole import FAILURE, wait_until_whole


def handle(name: str, worker: str = "", key: str = "") -> ActorHandle:
    return ActorHandle(name, "Actor", key or f"{name}-key", worker or f"w-{name}", "tcp://10.0.0.1:2")


@dataclass
class WrittenCluster:
    """Workers as the test says; remembers what was asked of it."""

    living: dict[str, list[str]] = field(default_factory=dict)
    published: list[RunActors] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)

    def workers(self):
        return self.living

    def publish(self, actors):
        self.published.append(actors)

    def restart(self, address):
        self.restarted.append(address)


class WrittenHealth:
    def __init__(self):
        self.sick_next: list[tuple[ActorHandle, str]] = []

    def sick(self, actors):
        found, self.sick_next = self.sick_next, []
        return found


class Room:
    """A supervised run. Builds happen at once; time is the test's."""

    def __init__(self, **settings):
        self.now = 0.0
        self.lines: list[str] = []
        self.calls: list[tuple[str, str, tuple]] = []
        self.replaced: list[tuple[str, str]] = []
        self.broken_builds = 0
        self.cluster, self.health = WrittenCluster(), WrittenHealth()
        self.engine, self.learner, self.queue = handle("engine-compute-0"), handle("learner"), handle("control")
        self.rollouts = (handle("rollout-0"), handle("rollout-1"))
        actors = RunActors("run", {"compute": (self.engine,)}, self.learner, self.queue, self.rollouts)
        names = ("rollout-0", "rollout-1")
        seats = {
            Seat("control", "control", ("control",)): self.queue,
            Seat("learner", "learner", ("learner",)): self.learner,
            Seat("engine-compute-0", "engine", ("compute",)): self.engine,
            **{
                Seat(each.name, "environment", ("cpu",), tuple(other for other in names if other != each.name)): each
                for each in self.rollouts
            },
        }
        self.supervisor = Supervisor(
            self.cluster,
            actors,
            seats,
            {name: self.builder(name) for name in ("learner", "engine-compute-0", *names)},
            RecoveryConfig(replacement_wait_s=30, **settings),
            self.lines.append,
            health=self.health,  # type: ignore[arg-type]
            on_replaced=lambda old, new: self.replaced.append((old.name, new.name)),
            call=self.call,
            clock=lambda: self.now,
            run_beside=lambda work: work(),
        )

    def builder(self, name):
        def build(worker, nth):
            if self.broken_builds:
                self.broken_builds -= 1
                raise ValueError("no weights")
            is_rollout = name.startswith("rollout")
            return handle(f"{name}-r{nth}" if is_rollout else name, worker, f"{name}-again-{nth}")

        return build

    def call(self, actor, method, *arguments, timeout_s):
        self.calls.append((actor.name, method, arguments))

    def lose(self, *handles: ActorHandle):
        for each in handles:
            self.supervisor.note_loss(each, f"{each} was lost: its worker is gone")

    def step(self, seconds=0.0, times=2):
        self.now += seconds
        for _ in range(times):
            self.supervisor.step(0.0)


def test_a_lost_engine_is_rebuilt_and_joined():
    room = Room()
    room.lose(room.engine)
    room.step()
    assert "actor engine-compute-0" in room.lines[0]
    assert not room.cluster.published
    room.cluster.living = {"compute": ["w-new"]}
    room.step(1.0)
    (new,) = room.supervisor.actors.engines["compute"]
    assert (new.worker, new.key) == ("w-new", "engine-compute-0-again-1")
    assert room.cluster.published[-1] == room.supervisor.actors
    assert room.supervisor.actors.facts["restarts"] == {"engine": 1}
    assert room.replaced == [("engine-compute-0", "engine-compute-0")]
    told = [(name, arguments[0]["compute"]) for name, method, arguments in room.calls if method == "set_engines"]
    assert told == [(each.name, [("engine-compute-0", new)]) for each in room.rollouts]
    room.supervisor.check()


def test_the_queue_hears_of_a_lost_rollout_worker_before_its_successor_is_built():
    room = Room()
    room.cluster.living = {"cpu": ["w-rollout-1", "w-new"]}
    room.lose(room.rollouts[0])
    room.step()
    assert [(name, method) for name, method, _ in room.calls] == [
        ("control", "worker_lost"),
        ("rollout-0-r1", "set_engines"),
    ]
    assert [each.name for each in room.supervisor.actors.rollout_workers] == ["rollout-0-r1", "rollout-1"]
    room.lose(room.supervisor.actors.rollout_workers[0])
    room.step()
    assert [each.name for each in room.supervisor.actors.rollout_workers] == ["rollout-0-r2", "rollout-1"]
    assert room.supervisor.restarts == {"environment": 2}


def test_a_lost_learner_takes_its_place_in_the_registry():
    room = Room()
    room.cluster.living = {"learner": ["w-new"]}
    room.lose(room.learner)
    room.step()
    learner = room.cluster.published[-1].learner
    assert learner is not None and learner.worker == "w-new"


def test_one_loss_counts_once_however_often_it_is_told():
    """A worker that was restarted as sick is told as lost once more by whoever watches the scheduler."""
    room = Room()
    room.cluster.living = {"compute": ["w-new"]}
    room.health.sick_next = [(room.engine, "engine-compute-0 failed its probe: no token")]
    room.step(10.0, times=3)
    assert room.cluster.restarted == ["w-engine-compute-0"]
    assert "engine-compute-0 failed its probe: no token; its worker process is restarted" in room.lines
    room.lose(room.engine)
    room.step()
    assert room.supervisor.restarts == {"engine": 1}
    assert room.supervisor.actors.engines["compute"][0].worker == "w-new"


def test_a_constructor_that_fails_is_tried_again():
    room = Room()
    room.broken_builds = 1
    room.cluster.living = {"learner": ["w-new"]}
    room.lose(room.learner)
    room.step(times=4)
    assert "learner could not be built again: ValueError: no weights" in room.lines
    assert room.supervisor.restarts == {"learner": 2}
    learner = room.supervisor.actors.learner
    assert learner is not None and learner.worker == "w-new"


def test_a_class_that_nobody_serves_any_more_leaves_the_registry():
    """S20: stages and proxies must not wait for what others stand in for."""
    room = Room()
    room.lose(room.rollouts[0])
    room.step()
    room.step(31.0)
    assert [each.name for each in room.cluster.published[-1].rollout_workers] == ["rollout-1"]
    assert any("rollout-1 stand in for it" in line for line in room.lines)
    room.cluster.living = {"cpu": ["w-rollout-1", "late"]}
    room.step(600.0)
    assert [each.name for each in room.cluster.published[-1].rollout_workers] == ["rollout-0-r1", "rollout-1"]


def test_the_end_is_told_to_whoever_waits():
    """The driver's check, the wait for a batch and stages that are run again all get the reason."""
    room = Room()
    room.lose(room.queue)
    room.step()
    with pytest.raises(InfrastructureFailure, match="actor control .* cannot be rebuilt; resume"):
        room.supervisor.check()
    assert ("control", "fail") in [(name, method) for name, method, _ in room.calls]
    published = room.cluster.published[-1]
    assert "cannot be rebuilt" in published.facts[FAILURE]
    with pytest.raises(InfrastructureFailure, match="cannot be rebuilt"):
        wait_until_whole("run", 10.0, find=lambda _: published, lives=lambda _: True)
    room.lose(room.learner)
    room.step()
    assert len(room.cluster.published) == 1, "nothing is rebuilt behind the end"


def test_waiting_for_a_whole_run_ends_when_it_is_whole_or_names_what_is_missing():
    room = Room()
    actors = room.supervisor.actors
    now = [0.0]
    dead = {room.learner, room.rollouts[0]}
    answers = iter([True, True, False, False])

    def learner_comes_back(each):
        return each not in dead or not (each == room.learner and next(answers))

    def sleep(seconds):
        now[0] += seconds

    clock = lambda: now[0]  # noqa: E731
    assert wait_until_whole("run", 10.0, find=lambda _: actors, lives=learner_comes_back, clock=clock, sleep=sleep)
    assert now[0] == 0.5, "a rollout worker is not waited for"
    with pytest.raises(DeadlineExceeded, match=r"waited 10 s .* still missing: actor learner \(Actor on w-learner\)$"):
        wait_until_whole("run", 10.0, find=lambda _: actors, lives=lambda e: e not in dead, clock=clock, sleep=sleep)
    with pytest.raises(DeadlineExceeded, match=r"still missing: actor engine-compute-0 "):
        wait_until_whole("run", 10.0, find=lambda _: actors, lives=lambda e: e != room.engine, clock=clock, sleep=sleep)
