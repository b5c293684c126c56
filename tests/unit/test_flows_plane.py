"""Which actors does a run have, who can stand in for whom, and from what is each built again?"""

from __future__ import annotations

from typing import Any, cast

import pytest

import flows.plane
from flows.config import RunConfig
from flows.plane import _Crew
from resources.hardware import HardwareClass
from resources.pools.actors import ActorHandle
from resources.pools.registry import RunActors
from resources.rollout.cross_policy import CrossPolicyConfig
from resources.runs import RunRef


class WrittenWorkers:
    """A client as far as `workers_by_class` goes: two workers of every class that the quickstart names."""

    def scheduler_info(self):
        classes = ("compute", "bandwidth", "learner", "cpu", "control")
        return {
            "workers": {
                f"tcp://{name}-{index}": {"name": f"{name}-{index}", "resources": {name: 1}}
                for name in classes
                for index in range(2)
            }
        }


class WrittenBuilders:
    """Remembers what it was asked to build."""

    def __init__(self) -> None:
        self.built: list[tuple[Any, ...]] = []
        self.prepared: list[tuple[str, str]] = []
        self.stale_engines: dict[str, list[str]] = {}

    def prepare(self, worker, role):
        self.prepared.append((worker, role))

    def _handle(self, name, worker, *facts):
        self.built.append((name, worker, *facts))
        return ActorHandle(name, "Actor", f"{name}-{len(self.built)}", worker, "tcp://scheduler")

    def learner(self, worker, hardware_class, model_directory, version, *, num_ranks=None):
        return self._handle("learner", worker, version, *([] if num_ranks is None else [num_ranks]))

    def engine(self, worker, hardware_class, index, version):
        return self._handle(f"engine-{hardware_class}-{index}", worker, version)

    def queue(self, worker, point, num_batches):
        return self._handle("control", worker, num_batches)

    def rollout_worker(self, worker, name, queue, engines, stale_engines):
        self.stale_engines[name] = list(stale_engines)
        return self._handle(name, worker, {key: [each.name for each in of] for key, of in engines.items()})


@pytest.fixture
def started(tmp_path, monkeypatch) -> tuple[_Crew, RunActors, WrittenBuilders]:
    monkeypatch.setattr(flows.plane, "call_sync", lambda actor, method, *arguments, timeout_s: 7)
    config = RunConfig(store=str(tmp_path), num_iterations=9)
    build = WrittenBuilders()
    run = RunRef(run_id="run", store_url=config.store)
    serving = {name: name for name in config.pools.classes}
    crew = _Crew(cast(Any, WrittenWorkers()), cast(Any, build), run, config, serving)
    actors = crew.start("model", None)
    crew.actors = lambda: actors
    return crew, actors, build


def test_one_engine_and_one_rollout_worker_on_each_worker_of_their_classes(started):
    crew, actors, _ = started
    hosts = {seat.name: handle.worker for seat, handle in crew.seats.items()}
    assert hosts == {
        "learner": "tcp://learner-0",
        "control": "tcp://control-0",
        **{f"engine-{name}-{i}": f"tcp://{name}-{i}" for name in ("compute", "bandwidth") for i in range(2)},
        **{f"rollout-{i}": f"tcp://cpu-{i}" for i in range(2)},
    }
    assert {handle.name for handle in actors.handles()} == set(hosts)


def test_who_stands_in_for_whom(started):
    """Engines of the class and of its fallbacks, the other rollout workers; nobody for learner and queue."""
    crew, _, _ = started
    stand_ins = {seat.name: set(seat.stand_ins) for seat in crew.seats}
    assert stand_ins["engine-compute-0"] == {"engine-compute-1", "engine-bandwidth-0", "engine-bandwidth-1"}
    assert stand_ins["rollout-0"] == {"rollout-1"}
    assert stand_ins["learner"] == stand_ins["control"] == set()
    assert sorted(crew.rebuild) == sorted(name for name in stand_ins if name != "control")


def test_engines_of_a_class_without_fallback_have_only_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(flows.plane, "call_sync", lambda actor, method, *arguments, timeout_s: 7)
    pools = RunConfig().pools
    alone = pools.model_copy(update={"classes": {**pools.classes, "compute": HardwareClass(role="engine")}})
    config = RunConfig(store=str(tmp_path)).model_copy(update={"pools": alone})
    serving = {name: name for name in config.pools.classes}
    run = RunRef(run_id="run", store_url=config.store)
    crew = _Crew(cast(Any, WrittenWorkers()), cast(Any, WrittenBuilders()), run, config, serving)
    crew.start("model", None)
    (seat,) = [seat for seat in crew.seats if seat.name == "engine-compute-0"]
    assert seat.stand_ins == ("engine-compute-1",)


def crossing_crew(tmp_path, **cross_policy) -> tuple[_Crew, WrittenBuilders]:
    """Two engines of each class; the families of one of them play with cross-policy sampling."""
    config = RunConfig(store=str(tmp_path))
    rollout = config.rollout.model_copy(
        update={"cross_policy": CrossPolicyConfig(p_stale=0.5, refresh_every=3, **cross_policy)}
    )
    lake = {"frozen_lake": config.families["frozen_lake"]}
    config = config.model_copy(update={"rollout": rollout, "families": lake})
    build = WrittenBuilders()
    serving = {name: name for name in config.pools.classes}
    run = RunRef(run_id="run", store_url=config.store)
    return _Crew(cast(Any, WrittenWorkers()), cast(Any, build), run, config, serving), build


def test_the_last_engine_of_a_class_that_plays_is_stale_and_stands_in_for_no_current_one(tmp_path, monkeypatch):
    monkeypatch.setattr(flows.plane, "call_sync", lambda actor, method, *arguments, timeout_s: 7)
    crew, build = crossing_crew(tmp_path)
    actors = crew.start("model", None)
    crew.actors = lambda: actors
    played = crew.config.families["frozen_lake"].hardware_class
    stale = f"engine-{played}-1"
    assert actors.refresh_every == {stale: 3}
    crew.rebuild["rollout-0"]("tcp://new", 1)
    assert build.stale_engines == {name: [stale] for name in ("rollout-0", "rollout-1", "rollout-0-r1")}
    stand_ins = {seat.name: seat.stand_ins for seat in crew.seats if seat.role == "engine"}
    assert all(stale not in others for others in stand_ins.values())
    assert f"engine-{played}-0" in stand_ins[stale]


def test_without_a_current_engine_nothing_is_built_and_an_evaluation_has_no_stale_one(tmp_path, monkeypatch):
    monkeypatch.setattr(flows.plane, "call_sync", lambda actor, method, *arguments, timeout_s: 7)
    crew, build = crossing_crew(tmp_path, stale_engines=2)
    with pytest.raises(ValueError, match="stale_engines is 2, .* has 2 engines"):
        crew.start("model", None)
    assert build.built == []
    assert crew.start(None, None).refresh_every == {} and not any(build.stale_engines.values())


def test_what_each_is_built_again_from(started):
    crew, _, build = started
    build.built.clear()
    folder = crew.run.folder()
    for version in (3, 4):
        folder.put_json(f"checkpoints/v{version:06d}/state.json", {})
    folder.put(f"checkpoints/v{5:06d}/model.safetensors", b"half a checkpoint")
    crew.rebuild["learner"]("tcp://new", 1)
    crew.rebuild["engine-compute-1"]("tcp://new", 1)
    crew.rebuild["rollout-0"]("tcp://new", 2)
    engines = {name: [f"engine-{name}-{i}" for i in range(2)] for name in ("bandwidth", "compute")}
    assert build.built == [
        ("learner", "tcp://new", 4, 2),  # a rank on each of the two learner workers
        ("engine-compute-1", "tcp://new", 7),
        ("rollout-0-r2", "tcp://new", engines),
    ]
    assert build.prepared == [("tcp://new", role) for role in ("learner", "engine", "environment")]


def test_an_engine_that_was_built_across_a_switch_begins_under_the_new_version(started, monkeypatch):
    crew, _, build = started
    build.built.clear()
    versions, calls = iter([7, 8]), []

    def call_sync(actor, method, *arguments, timeout_s):
        if method == "serving_version":
            return next(versions)
        calls.append((actor.name, method, *arguments))

    monkeypatch.setattr(flows.plane, "call_sync", call_sync)
    crew.rebuild["engine-compute-1"]("tcp://new", 1)
    assert build.built == [("engine-compute-1", "tcp://new", 7)]
    assert calls == [("engine-compute-1", "suspend"), ("engine-compute-1", "load", 8), ("engine-compute-1", "resume")]
