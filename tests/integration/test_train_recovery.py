"""A run outlives the sudden end of each of its processes but one: rollout worker, engine, learner; and says why it ends
when the group queue dies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from resources.object_store import ObjectStore
from resources.runs import find_run, iterations
from resources.telemetry.metrics import read_metrics
from resources.trajectories.batch import batch_versions
from resources.weights.store import WeightStore
from tests.integration.dask_workers import workers_of
from tests.integration.stack_processes import TrainProcess, driver_environment, train_process
from tests.integration.stack_runs import recorded_iterations, small_fields, trained_groups, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KNOWN_WITHIN_S = 5.0
"""S6."""
WAIT_S = 300.0
"""Longest wait for a run's next iterations, on a machine that is busy with other things."""


@dataclass
class Story:
    """A run whose rollout worker, engine and learner were killed, and that ended with the death of its queue."""

    store: ObjectStore
    run_id: str = ""
    killed_after: dict[str, int] = field(default_factory=dict)
    """Recorded iterations when each worker was killed."""
    exit_code: int = 0
    output: str = ""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("recovery")
    store, state = folder / "store", folder / "state"
    fields = small_fields(
        store,
        "recovery",
        num_iterations=10_000,
        evaluation={"before": False, "after": False},
        rollout={"length_finish": "step", "engine_cooldown_s": 0.5},
        recovery={"replacement_wait_s": 20.0},
    )
    told = Story(ObjectStore.open(str(store)))
    with train_process(fields, folder / "files", driver_environment(state), "--verbose") as driver:
        wait_for_iterations(driver, store, 1)
        told.run_id = find_run(str(store), "latest").run_id
        with workers_of(state, driver) as workers:
            for name in ("cpu-0", "compute-0"):
                told.killed_after[name] = len(recorded_iterations(store))
                before = driver.output.count("was lost: its worker is gone")
                workers.kill(name)
                wait_for(
                    f"the loss of {name} to be known",
                    lambda before=before: driver.output.count("was lost: its worker is gone") > before,
                    KNOWN_WITHIN_S,
                )
                wait_for_iterations(driver, store, told.killed_after[name] + 1)
            # The learner dies while it trains: a batch is taken, and not yet recorded.
            done = len(recorded_iterations(store))
            wait_for(
                "a batch in training",
                lambda: driver.assert_runs() and len(batch_versions(told.store, told.run_id)) > done,
                WAIT_S,
                poll_s=0.01,
            )
            told.killed_after["learner-0"] = done
            workers.kill("learner-0")
            wait_for_iterations(driver, store, done + 2)
            # A class loses its only worker for good: the other engine class stands in.
            workers.take_away("compute-0")
            wait_for(
                "a fallback", lambda: driver.assert_runs() and "stand in for it until one comes" in driver.output, 60
            )
            wait_for_iterations(driver, store, len(recorded_iterations(store)) + 1)
            workers.kill("control-0")
            told.exit_code = driver.wait(60)
        told.output = driver.output
    yield told


def wait_for_iterations(driver: TrainProcess, store: Path, number: int) -> None:
    wait_for(
        f"{number} iterations",
        lambda: driver.assert_runs() and len(recorded_iterations(store)) >= number,
        WAIT_S,
    )


def test_every_role_was_rebuilt(story: Story) -> None:
    rows = read_metrics(find_run(story.store.url, story.run_id).folder())
    last = rows[-1]
    assert {role: last[f"restarts/{role}"] for role in ("environment", "engine", "learner")} == {
        "environment": 1,
        "engine": 2,
        "learner": 1,
    }, story.output
    assert rows[0]["restarts/engine"] == 0
    (worker,) = last["workers"]
    assert worker["worker_id"] == "rollout-0-r1"


def test_a_class_without_workers_falls_back_and_says_so(story: Story) -> None:
    """S20."""
    assert "No worker of class 'compute' came to host engine-compute-0 within 20 s" in story.output
    last = read_metrics(find_run(story.store.url, story.run_id).folder())[-1]
    (worker,) = last["workers"]
    assert worker["proxy"]["num_fallbacks"]["compute->bandwidth"] > 0


def test_nothing_is_trained_twice_and_no_iteration_is_missing(story: Story) -> None:
    run = find_run(story.store.url, story.run_id)
    assert iterations(run) == list(range(len(iterations(run))))
    prompts = [prompt for groups in trained_groups(story.store, story.run_id).values() for prompt in groups]
    assert len(set(prompts)) == len(prompts)
    rows = read_metrics(run.folder())
    total = 0
    for row in rows:
        total += row["optimizer_steps"]
        assert row["optimizer_steps/total"] == total, "an update was lost, or done twice"
    assert set(iterations(run)) <= set(WeightStore(story.store, story.run_id).versions())


def test_losses_are_told_in_the_flow_runs_log(story: Story) -> None:
    for name in ("rollout-0", "engine-compute-0", "learner"):
        assert f"actor {name} (" in story.output
        assert f"{name} is built again on" in story.output


def test_the_end_of_the_queue_is_the_end_of_the_run(story: Story) -> None:
    assert story.exit_code == 1
    assert "temporary server" not in story.output, "something was logged outside the run's settings"
    assert "The group queue held the trajectories under way and cannot be rebuilt; resume the run" in story.output
