"""A run outlives what is sick and does not die: environments that hang, one that blocks the event loop of its worker,
an engine that answers and generates nothing."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from resources.object_store import ObjectStore
from resources.runs import find_run
from resources.telemetry.metrics import read_metrics
from tests.integration.dask_workers import workers_of
from tests.integration.sick_environments import stop_generating
from tests.integration.stack_processes import TrainProcess, driver_environment, train_process
from tests.integration.stack_runs import recorded_iterations, small_fields, trained_groups, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 300.0


def test_sick_environments_and_engines_are_found_named_and_replaced(tmp_path: Path) -> None:
    """Deadlines on environments with recycling; a blocked event loop by name; S25."""
    store, state, tokens = tmp_path / "store", tmp_path / "state", tmp_path / "tokens"
    tokens.mkdir()
    fields = small_fields(
        store,
        "sick",
        num_iterations=10_000,
        evaluation={"before": False, "after": False},
        rollout={
            "length_finish": "step",
            "max_abandoned_calls": 2,
            "generate_deadline_s": 5.0,
            "loop_block_limit_s": 4.0,
        },
        recovery={"health_period_s": 0.5, "answer_deadline_s": 5.0, "probe_deadline_s": 5.0},
    )
    module, arguments = "tests.integration.sick_environments", {"folder": str(tokens)}
    common: dict[str, Any] = {
        "groups_per_iteration": 1,
        "group_size": 4,
        "max_new_tokens": 8,
        "arguments": arguments,
        "step_deadline_s": 1.0,
    }
    fields["families"] = {
        "hanging": {"environment": f"{module}:HangsInItsThread", "hardware_class": "compute", **common},
        "blocking": {"environment": f"{module}:BlocksTheLoop", "hardware_class": "bandwidth", **common},
    }
    env = driver_environment(state)
    with train_process(fields, tmp_path / "files", env, "--verbose") as driver:
        iterations(driver, store, 1)
        folder = find_run(str(store), "latest").folder()

        for number in range(3):
            (tokens / f"hang-{number}").touch()
        rebuilt(driver, folder, "environment", 1)
        (tokens / "block-0").touch()
        rebuilt(driver, folder, "environment", 2)
        with workers_of(state, driver) as workers:
            assert workers.run(stop_generating, "compute-0") == ["compute-0"]
        rebuilt(driver, folder, "engine", 1)
        iterations(driver, store, 1)
        driver.process.send_signal(signal.SIGTERM)
        assert driver.wait(60) == 130
        output = driver.output
    run_id = find_run(str(store), "latest").run_id
    assert (
        "3 environment calls were abandoned and hold a thread each, more than rollout.max_abandoned_calls (2)" in output
    )
    assert "in step of the environment of 'blocking', at step (" in output
    assert "sick_environments.py:" in output
    assert "failed its probe: " in output
    prompts = [prompt for groups in trained_groups(ObjectStore.open(str(store)), run_id).values() for prompt in groups]
    assert len(set(prompts)) == len(prompts)


def iterations(driver: TrainProcess, store: Path, num_more: int) -> None:
    before = len(recorded_iterations(store))
    wait_for(
        f"{num_more} more iterations",
        lambda: driver.assert_runs() and len(recorded_iterations(store)) >= before + num_more,
        WAIT_S,
    )


def rebuilt(driver: TrainProcess, folder: ObjectStore, role: str, number: int) -> None:
    """Wait for an iteration behind so many restarts of a role."""
    wait_for(
        f"{number} restarts of role {role} and an iteration",
        lambda: driver.assert_runs() and read_metrics(folder)[-1][f"restarts/{role}"] >= number,
        WAIT_S,
    )
