"""The switch of engines to a version: which of them, in which order, what is told to whom, and what a failure leaves
behind."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

import tasks.weights.stage as stage
from resources.engines.base import LoadReport
from resources.failures import EngineFailure, InfrastructureFailure
from resources.pools.actors import ActorHandle
from resources.pools.registry import RunActors
from resources.runs import RunRef
from tasks.weights.stage import _switch


class WrittenEngine:
    """Notes what it is told; fails at what it is told to."""

    def __init__(self, name: str, told: list[str], *, fails_at: str = "", error: Exception | None = None) -> None:
        self.name, self.told, self.fails_at = name, told, fails_at
        self.error = error or EngineFailure(f"{name} is dead")

    def _note(self, what: str) -> None:
        self.told.append(f"{self.name} {what}")
        if self.fails_at == what:
            raise self.error

    async def suspend(self) -> None:
        self._note("suspend")

    async def load(self, version: int) -> LoadReport:
        self._note("load")
        return LoadReport(version=version, exposed_s=0.25, total_s=2.0, num_bytes=8, recomputed_tokens=7)

    async def resume(self) -> None:
        self._note("resume")

    def __repr__(self) -> str:
        return self.name


class WrittenQueue:
    def __init__(self, told: list[str]) -> None:
        self.told = told

    async def version_loaded(self, version: int) -> None:
        self.told.append(f"queue version_loaded {version}")


def switch(told: list[str], *engines: WrittenEngine, warnings: list[str] | None = None):
    warn = (warnings if warnings is not None else []).append
    return asyncio.run(_switch(list(engines), WrittenQueue(told), 5, 10.0, warn))


def test_all_stop_before_one_loads_and_the_gate_knows_before_one_goes_on() -> None:
    told: list[str] = []
    reports, suspended_s = switch(told, WrittenEngine("a", told), WrittenEngine("b", told))
    assert told == [
        "a suspend", "b suspend", "a load", "b load", "queue version_loaded 5", "a resume", "b resume",
    ]  # fmt: skip
    assert [(report.exposed_s, report.total_s) for report in reports] == [(0.25, 2.0)] * 2, "kept apart"
    assert suspended_s >= 0.0


@pytest.mark.parametrize("fails_at", ["suspend", "load"])
def test_an_engine_that_fails_is_left_out_and_said(fails_at: str) -> None:
    told: list[str] = []
    warnings: list[str] = []
    engines = WrittenEngine("a", told, fails_at=fails_at), WrittenEngine("b", told)
    reports, _ = switch(told, *engines, warnings=warnings)
    assert len(reports) == 1
    assert "queue version_loaded 5" in told and "b resume" in told
    assert any(f"a is left out of {fails_at}(): a is dead" in line for line in warnings)


def test_without_an_engine_left_nothing_is_called_loaded_and_all_may_go_on() -> None:
    told: list[str] = []
    with pytest.raises(InfrastructureFailure, match=r"no engine is left to load\(\): a is dead"):
        switch(told, WrittenEngine("a", told, fails_at="load"))
    assert told == ["a suspend", "a load", "a resume"]


def test_what_is_no_loss_is_raised_and_engines_go_on_with_the_old_weights() -> None:
    told: list[str] = []
    wrong = ValueError("version 5 is not in the store")
    with pytest.raises(ValueError, match="not in the store"):
        switch(told, WrittenEngine("a", told, fails_at="load", error=wrong), WrittenEngine("b", told))
    assert "queue version_loaded 5" not in told and told[-2:] == ["a resume", "b resume"]


# -- which engines --------------------------------------------------------------------------------------------------


@dataclass
class WrittenPlane:
    """Actors that remember their calls, behind the functions that a stage reaches them by."""

    actors: RunActors
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    async def call(self, actor, method, *arguments):
        self.calls.append((actor.name, method, *arguments))
        return LoadReport(arguments[0], 0.0, 0.0, 0) if method == "load" else None

    def call_sync(self, actor, method, *arguments, timeout_s, **named):
        self.calls.append((actor.name, method, *arguments))
        return {} if method == "publish" else 0.5

    def of(self, method: str) -> list[str]:
        return sorted(name for name, called, *_ in self.calls if called == method)


def handle(name: str) -> ActorHandle:
    return ActorHandle(name, "Actor", f"{name}-key", f"w-{name}", "")


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> WrittenPlane:
    engines = {
        "bandwidth": (handle("engine-bandwidth-0"),),
        "compute": tuple(handle(f"engine-compute-{index}") for index in range(2)),
    }
    actors = RunActors("run", engines, handle("learner"), handle("queue"), refresh_every={"engine-compute-1": 3})
    plane = WrittenPlane(actors)
    monkeypatch.setattr(stage, "lookup_sync", lambda service_id, max_age_s: actors)
    monkeypatch.setattr(stage, "call", plane.call)
    monkeypatch.setattr(stage, "call_sync", plane.call_sync)
    monkeypatch.setattr(stage, "get_run_logger", lambda: logging.getLogger("test"))
    return plane


CURRENT = ["engine-bandwidth-0", "engine-compute-0"]
ALL = [*CURRENT, "engine-compute-1"]


@pytest.mark.parametrize("version", range(1, 8))
def test_a_stale_engine_prefetches_and_loads_every_third_version_only(plane: WrittenPlane, version: int) -> None:
    run = RunRef(run_id="run", store_url="file:///nowhere")
    stage.publish.fn(run, version, 5.0)
    metrics = stage.switch_weights.fn(run, version, 5.0)
    loading = ALL if version % 3 == 0 else CURRENT
    for method in ("prefetch", "suspend", "load", "resume"):
        assert plane.of(method) == loading, method
    assert plane.calls.index(("queue", "version_loaded", version)) > plane.calls.index((loading[0], "load", version))
    assert metrics["weights/load_waited_s"] == 0.5


def test_every_engine_knows_the_version_it_must_hold(plane: WrittenPlane) -> None:
    current, stale = handle("engine-compute-0"), handle("engine-compute-1")
    for serving in range(8):
        assert plane.actors.version_due(current, serving) == serving
        due = plane.actors.version_due(stale, serving)
        assert stale in plane.actors.engines_loading(due) and serving - 2 <= due <= serving
