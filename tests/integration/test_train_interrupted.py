"""Interruption and resume with real processes and real signals: who ends, what is left, and where a run goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest

from flows.server import prefect_server
from resources.object_store import ObjectStore
from resources.pools.local_stack import read_status
from resources.runs import find_run, iterations, read_iteration
from resources.telemetry.metrics import read_metrics
from resources.trajectories.batch import read_batch
from resources.trajectories.rewards_view import rewarded_trajectories
from resources.weights.store import WeightStore
from tests.integration.stack_processes import (
    GONE_WITHIN_S,
    TrainProcess,
    assert_gone,
    driver_environment,
    stack_pids,
    train_process,
)
from tests.integration.stack_runs import (
    flow_runs_named,
    recorded_iterations,
    sampled_versions,
    small_fields,
    subflow_runs,
    trained_groups,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

START_S = 400.0
"""Longest wait for a run's first iterations, on a machine that is busy with other things."""
MANY = 10_000


@dataclass
class Left:
    """What lies in the store of a run between two of its drivers."""

    done: list[int]
    manifests: dict[str, bytes]
    """Batches and iterations, by key."""
    files: set[str]
    """Trajectory files."""
    weights: dict[int, str]
    """Digest of each version's tensors."""
    queue_state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, store: ObjectStore, run_id: str) -> Left:
        run = find_run(store.url, run_id)
        done = iterations(run)
        weights = WeightStore(store, run_id)
        # A batch beyond the last recorded iteration is taken anew, so it is no part of what must stay.
        numbered = [*(f"batches/{version:06d}.json" for version in done), *run.folder().list("iterations/")]
        return cls(
            done=done,
            manifests={key: run.folder().get(key) for key in numbered},
            files=set(run.folder().list("trajectories/")),
            weights={
                version: weights.manifest(version).files["model.safetensors"].sha256
                for version in weights.versions()
                if version <= done[-1] + 1
            },
            queue_state=read_iteration(run, done[-1])["queue_state"],
        )


@dataclass
class Story:
    """A run that was killed, resumed, interrupted, resumed, and came to its end."""

    store: ObjectStore
    run_id: str = ""
    stops: list[Left] = field(default_factory=list)
    exit_codes: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    flow_runs: list[tuple[Any, set[str]]] = field(default_factory=list)
    """In the history, in order: the final state of each `train`, and the kinds of state of its iterations."""

    def stop(self) -> None:
        self.run_id = find_run(self.store.url, "latest").run_id
        self.stops.append(Left.read(self.store, self.run_id))

    def rows_between(self, before: Left, after: Left) -> pa.Table:
        """Trajectories that the driver between two stops has written."""
        folder = self.store.local_path(f"runs/{self.run_id}")
        assert folder is not None
        files = [folder / key for key in sorted(after.files - before.files)]
        return pyarrow.dataset.dataset(files, format="ipc").to_table()


def iterating(driver: TrainProcess, store: Path, num_more: int) -> None:
    """Wait until a driver has recorded so many more iterations than there are now."""
    before = len(recorded_iterations(store))
    wait_for(
        f"{num_more} more iterations of {store.name}",
        lambda: driver.assert_runs() and len(recorded_iterations(store)) >= before + num_more,
        START_S,
    )


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("interrupted")
    state = folder / "state"
    env = driver_environment(state)
    # No evaluation: it would only take time.
    fields = {"num_iterations": MANY, "evaluation": {"before": False, "after": False}}
    one, other = folder / "one", folder / "other"
    told = Story(ObjectStore.open(str(one)))
    with ExitStack() as opened:
        driver = opened.enter_context(train_process(small_fields(one, "one", **fields), folder / "files-one", env))
        beside = opened.enter_context(
            train_process(small_fields(other, "other", **fields), folder / "files-other", env)
        )
        iterating(beside, other, 1)
        iterating(driver, one, 2)

        # SIGTERM ends what belongs to one driver, in order; the other one goes on.
        theirs = beside.below()
        assert len(theirs) >= 7, theirs  # driver, Dask scheduler, five workers
        beside.process.send_signal(signal.SIGTERM)
        assert_gone(theirs)
        told.exit_codes["SIGTERM"] = beside.wait(1)
        told.outputs["SIGTERM"] = beside.output
        iterating(driver, one, 1)

        # SIGKILL of the last driver: S7.
        everything = [*driver.below(), *stack_pids(state)]
        driver.process.kill()
        assert_gone(everything)
        told.exit_codes["SIGKILL"] = driver.wait(1)
        told.stop()

        # Ctrl-C of a resumed run.
        again = small_fields(one, "one", **fields)
        driver = opened.enter_context(train_process(again, folder / "files-one", env, "--resume", told.run_id))
        iterating(driver, one, 2)
        everything = [*driver.below(), *stack_pids(state)]
        driver.process.send_signal(signal.SIGINT)
        assert_gone(everything)
        told.exit_codes["SIGINT"] = driver.wait(1)
        told.outputs["SIGINT"] = driver.output
        told.stop()

        # And to its end.
        last = {**again, "num_iterations": len(told.stops[-1].done) + 2}
        driver = opened.enter_context(train_process(last, folder / "files-one", env, "--resume", "latest"))
        told.exit_codes["end"] = driver.wait(START_S)
        told.outputs["end"] = driver.output
        assert read_status(state) is None
        told.stop()
        with pytest.MonkeyPatch.context() as environment:
            environment.delenv("PREFECT_API_URL", raising=False)
            with prefect_server(state_dir=state, work_pools={}):
                for run in flow_runs_named("train", "one"):
                    below = {str(each.state_type) for each in subflow_runs(run.id, "rl-iteration")}
                    told.flow_runs.append((run.state, below))
        yield told


def test_signals_end_everything_in_time_and_say_what_to_do(story: Story) -> None:
    """S7 for SIGKILL; the fixture checks that nothing is left 10 s later."""
    assert GONE_WITHIN_S == 10
    assert story.exit_codes == {"SIGTERM": 130, "SIGKILL": -signal.SIGKILL, "SIGINT": 130, "end": 0}, story.outputs
    assert "resume with --resume latest" in story.outputs["SIGTERM"]
    assert "resume with --resume latest" in story.outputs["SIGINT"]


def test_no_flow_run_of_a_killed_driver_stays_running(story: Story) -> None:
    killed, interrupted, ended = story.flow_runs
    assert killed[0].is_crashed() and f"resume the run with --resume {story.run_id}" in killed[0].message
    assert interrupted[0].is_final() and ended[0].is_completed()
    for _, iterations_below in story.flow_runs:
        assert not iterations_below & {"StateType.RUNNING", "StateType.PENDING", "RUNNING", "PENDING"}


def test_a_resume_goes_on_behind_the_last_recorded_iteration(story: Story) -> None:
    """S10: iteration k + 1 follows iteration k, however often the run was interrupted; the number asked for is done."""
    killed, interrupted, ended = story.stops
    for left in story.stops:
        assert left.done == list(range(len(left.done)))
    assert len(interrupted.done) >= len(killed.done) + 2
    assert len(ended.done) == len(interrupted.done) + 2
    folder = find_run(story.store.url, story.run_id).folder()
    assert folder.get_json("summary.json")["num_iterations"] == len(ended.done)
    metrics = read_metrics(folder)
    assert [row["iteration"] for row in metrics] == ended.done
    steps = [row["optimizer_steps/total"] for row in metrics]
    grown = [after - before for before, after in pairwise([0, *steps])]
    assert grown == [row["optimizer_steps"] for row in metrics], "the learner's counters go on where they were"


@pytest.mark.parametrize("which", [0, 1])
def test_what_was_done_before_stays_as_it_was(story: Story, which: int) -> None:
    """Nothing is trained twice: manifests and weights of the versions before the stop are untouched by the resume."""
    before, after = story.stops[which], story.stops[which + 1]
    assert before.manifests.items() <= after.manifests.items()
    assert before.weights.items() <= after.weights.items(), "the resumed learner published other weights"
    assert before.files <= after.files


@pytest.mark.parametrize("which", [0, 1])
def test_engines_hold_the_resumed_version_before_the_first_request(story: Story, which: int) -> None:
    """S11: no token of an earlier version is sampled after the resume, and so none for an earlier batch."""
    before, after = story.stops[which], story.stops[which + 1]
    # Later ones only, when all that the bound allows to play ahead was complete at the stop.
    assert min(sampled_versions(story.rows_between(before, after))) >= before.done[-1] + 1


@pytest.mark.parametrize("which", [0, 1])
def test_prompts_of_trained_groups_are_not_issued_again(story: Story, which: int) -> None:
    before, after = story.stops[which], story.stops[which + 1]
    trained = trained_groups(story.store, story.run_id)
    earlier = {prompt for version in before.done for prompt in trained[version]}
    rows = story.rows_between(before, after)
    played = set(zip(rows["family"].to_pylist(), rows["seed_env"].to_pylist(), strict=True))
    assert not played & earlier


def test_no_prompt_is_trained_twice(story: Story) -> None:
    """S9, over two interruptions."""
    prompts = [prompt for groups in trained_groups(story.store, story.run_id).values() for prompt in groups]
    assert len(set(prompts)) == len(prompts)


def test_no_id_returns_and_every_trained_reward_is_its_own_trajectorys(story: Story) -> None:
    """S26: a score that a killed driver's trajectory got is never taken for another one's."""
    rows = rewarded_trajectories(story.store, story.run_id, columns=["trajectory_id"])
    final = dict(zip(rows["trajectory_id"].to_pylist(), rows["final_reward"].to_pylist(), strict=True))
    assert len(final) == rows.num_rows
    for version in trained_groups(story.store, story.run_id):
        for group in read_batch(story.store, story.run_id, version).groups:
            assert {member.trajectory_id: member.reward for member in group.members}.items() <= final.items()


@pytest.mark.parametrize("which", [0, 1])
def test_groups_that_were_complete_are_trained_first(story: Story, which: int) -> None:
    """What was finished and scored but not trained is used, not played again; a batch that was taken already first."""
    before = story.stops[which]
    resumed = before.done[-1] + 1
    following = {group.group_id for group in read_batch(story.store, story.run_id, resumed).groups}
    taken_back = int(before.queue_state["next_batch"]) > resumed
    for family, state in before.queue_state["families"].items():
        finished = [group["group_id"] for group in (*(state["in_training"] if taken_back else ()), *state["complete"])]
        quota = 2 if family == "guess_number" else 1
        assert following >= set(finished[:quota]), family
