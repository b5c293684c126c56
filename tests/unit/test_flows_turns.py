"""Two iterations at once: the order in which they use learner and engines, and what a failure does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flows import turns
from flows.turns import Iterations, Turn, turn_of
from resources.failures import DeadlineExceeded, InfrastructureFailure

WAIT_S = 10.0


class StagedIteration:
    """Goes through an iteration's steps, writes them down, and stops where it is told to until it is let go."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self._gates: dict[str, threading.Event] = {}
        self._reached: dict[str, threading.Event] = {}
        self.failing: dict[str, Exception] = {}

    def hold(self, step: str) -> None:
        self._gates[step] = threading.Event()
        self._reached[step] = threading.Event()

    def wait_until_at(self, step: str) -> None:
        assert self._reached[step].wait(WAIT_S), (step, self.steps)

    def let_go(self, step: str) -> None:
        self._gates[step].set()

    def _step(self, name: str, version: int) -> None:
        step = f"{name} {version}"
        if step in self._gates:
            self._reached[step].set()
            assert self._gates[step].wait(WAIT_S), (step, self.steps)
        if step in self.failing:
            raise self.failing[step]
        self.steps.append(step)

    def __call__(self, version: int) -> dict[str, Any]:
        turn = turn_of(version)
        self._step("collect", version)
        turn.has_collected()
        turn.wait_for_learner(WAIT_S)
        self._step("update", version)
        self._step("publish", version)
        turn.has_published()
        turn.wait_for_engines(WAIT_S)
        self._step("switch", version)
        self._step("record", version)
        return {"iteration": version}


class RunInBackground:
    """The thread of the run: takes the rows as they come."""

    def __init__(self, play: Callable[[int], dict[str, Any]], num_iterations: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self._play, self._num_iterations = play, num_iterations
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with Iterations(overlap=True) as iterations:
                for row in iterations.run(self._play, range(self._num_iterations), WAIT_S):
                    self.rows.append(row)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def test_the_next_update_runs_beside_switch_and_record() -> None:
    iteration = StagedIteration()
    iteration.hold("switch 0")
    iteration.hold("switch 1")
    run = RunInBackground(iteration, 2)
    iteration.wait_until_at("switch 0")
    # Iteration 1 trains and publishes while iteration 0 has not loaded its version yet...
    iteration.let_go("switch 1")
    for _ in range(1000):
        if "publish 1" in iteration.steps:
            break
        threading.Event().wait(0.005)
    assert "publish 1" in iteration.steps and "switch 0" not in iteration.steps
    # ...and loads its own only when the one before has ended.
    assert "switch 1" not in iteration.steps
    iteration.let_go("switch 0")
    run.join()
    assert run.error is None
    assert iteration.steps.index("record 0") < iteration.steps.index("switch 1")
    assert run.rows == [{"iteration": 0}, {"iteration": 1}]


def test_an_iteration_collects_early_but_updates_only_when_the_learner_is_free() -> None:
    iteration = StagedIteration()
    iteration.hold("publish 0")
    iteration.hold("collect 1")
    run = RunInBackground(iteration, 2)
    iteration.wait_until_at("collect 1")
    iteration.wait_until_at("publish 0")
    iteration.let_go("collect 1")
    iteration.let_go("publish 0")
    run.join()
    assert iteration.steps.index("publish 0") < iteration.steps.index("update 1")


def test_every_order_holds_over_many_iterations() -> None:
    iteration = StagedIteration()
    run = RunInBackground(iteration, 12)
    run.join()
    assert run.error is None and [row["iteration"] for row in run.rows] == list(range(12))
    at = {step: index for index, step in enumerate(iteration.steps)}
    for v in range(11):
        assert at[f"collect {v}"] < at[f"collect {v + 1}"]
        assert at[f"publish {v}"] < at[f"update {v + 1}"]
        assert at[f"record {v}"] < at[f"switch {v + 1}"]
    for v in range(10):
        assert at[f"record {v}"] < at[f"collect {v + 2}"], "no more than two at once"


def test_a_failure_ends_the_run_with_what_was_raised() -> None:
    iteration = StagedIteration()
    iteration.failing["switch 1"] = ValueError("engine compute-0 refused version 2")
    run = RunInBackground(iteration, 6)
    run.join()
    assert isinstance(run.error, ValueError) and "refused version 2" in str(run.error)
    assert run.rows == [{"iteration": 0}]
    assert not any(step.startswith(("switch 2", "collect 3")) for step in iteration.steps)


def test_who_waits_for_a_failed_iteration_is_told() -> None:
    failed = Turn(3)
    failed.has_ended(None, ValueError("no batch"))
    with pytest.raises(InfrastructureFailure, match="iteration 3, which this one goes on from, failed: no batch"):
        Turn(4, failed).wait_for_learner(WAIT_S)


def test_a_wait_ends() -> None:
    with pytest.raises(DeadlineExceeded, match="iteration 3 did not publish its version within 0.01 s"):
        Turn(4, Turn(3)).wait_for_learner(0.01)


def test_one_at_a_time_without_overlap() -> None:
    iteration = StagedIteration()
    with Iterations(overlap=False) as iterations:
        assert [row["iteration"] for row in iterations.run(iteration, range(3), WAIT_S)] == [0, 1, 2]
    assert iteration.steps[:5] == ["collect 0", "update 0", "publish 0", "switch 0", "record 0"]
    assert iteration.steps[5] == "collect 1"


@pytest.mark.parametrize("overlap", [False, True])
def test_laps_add_up_to_the_time_of_the_run(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration's time holds what lies between it and the one before; the first one's begins with it."""
    now = iter([15.0, 23.0, 40.0])
    monkeypatch.setattr(turns, "time", SimpleNamespace(time=lambda: next(now), monotonic=time.monotonic))

    def play(version: int) -> dict[str, Any]:
        turn = turn_of(version)
        turn.has_collected()
        turn.wait_for_engines(WAIT_S)
        return {"lap": turn.lap(started=12.0)}

    with Iterations(overlap) as iterations:
        assert [row["lap"] for row in iterations.run(play, range(3), WAIT_S)] == [3.0, 8.0, 17.0]
    assert turn_of(0) is not turn_of(0), "outside, nothing is left of the last turn"
