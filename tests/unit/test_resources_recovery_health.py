"""Who is sick although its process lives? (S25)"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from resources.failures import DeadlineExceeded, EngineFailure, InfrastructureFailure
from resources.pools.actors import ActorHandle
from resources.pools.registry import RunActors
from resources.recovery.config import RecoveryConfig
from resources.recovery.health import HealthRound

QUICK = RecoveryConfig(answer_deadline_s=0.05, probe_deadline_s=0.05, build_timeout_s=0.05)


def handle(name: str) -> ActorHandle:
    return ActorHandle(name, "Actor", f"{name}-key", f"w-{name}", "")


@dataclass
class Stats:
    version: int


@dataclass
class Engine:
    version: int = 3
    failure: Exception | None = None
    hangs: bool = False
    """Answers everything but never generates: an engine behind a healthy health endpoint."""
    load_error: Exception | None = None
    calls: list[str] = field(default_factory=list)

    async def stats(self):
        if self.failure is not None:
            raise self.failure
        return Stats(self.version)

    async def probe(self, timeout_s):
        self.calls.append("probe")
        if self.hangs:
            raise DeadlineExceeded(f"engine answers, but generated no token within {timeout_s} s")
        return 0.001

    async def suspend(self):
        self.calls.append("suspend")

    async def load(self, version):
        self.calls.append(f"load {version}")
        if self.load_error is not None:
            raise self.load_error
        self.version = version

    async def resume(self):
        self.calls.append("resume")


@dataclass
class Worker:
    suspects: tuple[str, ...] = ()
    worn_out: str = ""
    silent: bool = False

    async def health(self):
        if self.silent:
            await asyncio.Event().wait()
        return {"worn_out": self.worn_out, "suspects": list(self.suspects)}


class Queue:
    async def serving_version(self):
        return 3


class Room:
    def __init__(self, engine: Engine | None = None, worker: Worker | None = None):
        self.engine, self.worker = engine or Engine(), worker or Worker()
        self.actors = RunActors("run", {"compute": (handle("engine"),)}, None, handle("queue"), (handle("rollout"),))
        self.objects = {"engine": self.engine, "rollout": self.worker, "queue": Queue()}
        self.round = HealthRound(QUICK, call=self.call)

    async def call(self, actor, method, *arguments):
        return await getattr(self.objects[actor.name], method)(*arguments)

    def sick(self) -> dict[str, str]:
        return {each.name: reason for each, reason in self.round.sick(self.actors)}


def test_who_is_well_is_left_alone():
    room = Room()
    assert room.sick() == {} and room.engine.calls == []


def test_an_engine_that_answers_but_generates_nothing_is_found_by_its_probe():
    """S25: its statistics look healthy; a complaint leads to a probe, and the probe decides."""
    room = Room(Engine(hangs=True))
    assert room.sick() == {}, "nobody has complained"
    room.worker.suspects = ("engine",)
    assert "failed its probe: engine answers, but generated no token" in room.sick()["engine"]


def test_a_complaint_about_an_engine_that_generates_changes_nothing():
    room = Room(worker=Worker(suspects=("engine",)))
    assert room.sick() == {} and room.engine.calls == ["probe"]


def test_an_engine_whose_thread_died_is_found_without_a_complaint():
    assert (
        "dead although its process lives: out of memory"
        in Room(Engine(failure=EngineFailure("out of memory"))).sick()["engine"]
    )


def test_a_lost_engine_is_not_this_rounds_business():
    assert Room(Engine(failure=InfrastructureFailure("its worker is gone"))).sick() == {}


def test_an_engine_that_missed_a_switch_is_brought_up():
    """One that was being built while the others switched; once is a switch under way."""
    room = Room(Engine(version=2))
    assert room.sick() == {} and room.engine.calls == []
    assert room.sick() == {}
    assert room.engine.calls == ["suspend", "load 3", "resume"] and room.engine.version == 3
    room.sick()
    assert len(room.engine.calls) == 3


def test_a_stale_engine_is_left_behind_as_far_as_it_may_be():
    """Every second version: with 3 in force it holds 2 by right; one that missed 2 loads what is in force."""
    room = Room(Engine(version=2))
    room.actors = replace(room.actors, refresh_every={"engine": 2})
    for _ in range(3):
        assert room.sick() == {} and room.engine.calls == []
    room.engine.version = 1
    room.sick()
    room.sick()
    assert room.engine.calls == ["suspend", "load 3", "resume"]


def test_an_engine_that_cannot_be_brought_up_is_restarted():
    room = Room(Engine(version=2, load_error=EngineFailure("no such version")))
    room.sick()
    assert "cannot load version 3: no such version" in room.sick()["engine"]
    assert room.engine.calls[-1] == "resume"


def test_a_worn_out_rollout_worker_is_replaced():
    reason = "33 environment calls were abandoned"
    assert Room(worker=Worker(worn_out=reason)).sick()["rollout"].endswith(f"must be replaced: {reason}")


def test_a_silent_rollout_worker_is_restarted_after_two_rounds():
    room = Room(worker=Worker(silent=True))
    assert room.sick() == {}
    assert "did not say how it is, twice in a row" in room.sick()["rollout"]
    room.worker.silent = False
    room.round = HealthRound(QUICK, call=room.call)
    room.worker.silent = True
    room.sick()
    room.worker.silent = False
    room.sick()
    room.worker.silent = True
    assert room.sick() == {}, "one answer in between and it counts anew"
