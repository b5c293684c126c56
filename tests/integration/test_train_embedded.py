"""The main job, end to end, on embedded pools: `train(config)` from Python with the asynchronous pipeline, and beside
it ``python -m flows.train`` with the synchronous one and streamed updates. Two runs at once that share a state folder,
and so a server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import polars
import pyarrow.dataset
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import FlowRun

from flows.server import prefect_server
from flows.train import train
from resources.environments.registry import quickstart_families
from resources.object_store import ObjectStore
from resources.runs import find_run, iterations
from resources.telemetry.metrics import read_metrics
from resources.trajectories.batch import read_batch
from resources.trajectories.rewards_view import rewarded_trajectories, rewards_table
from resources.weights.store import WeightStore
from tests.integration.stack_processes import driver_environment, train_process
from tests.integration.stack_runs import (
    assert_stages_ran_on_their_workers,
    flow_run_named,
    lags_of_trained_tokens,
    log_lines,
    sampled_versions,
    small_config,
    small_fields,
    subflow_runs,
    trained_groups,
    trajectory_rows,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAMILIES = sorted(quickstart_families())
POOL_SCORERS = {"calculator": "exact_answer", "code_repair": "unit_tests"}
NUM_EPISODES = 8


@dataclass(frozen=True)
class Finished:
    """A finished run: its summary, its store, its flow run."""

    summary: dict[str, Any]
    store: ObjectStore
    flow_run: FlowRun

    @property
    def run_id(self) -> str:
        return self.summary["run_id"]

    @property
    def folder(self) -> ObjectStore:
        return self.store.sub(f"runs/{self.run_id}")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Finished]]:
    state, stores = tmp_path_factory.mktemp("state"), tmp_path_factory.mktemp("stores")
    beside = small_fields(
        stores / "synchronous",
        "synchronous",
        rollout={"pipeline": "synchronous", "max_staleness": 0},
        training={"streamed": True, "minibatches": 1, "max_tokens_per_microbatch": 256},
        num_iterations=2,
    )
    beside["families"]["guess_number"]["environment"] = "tests.integration.delayed_environments:UnhurriedGuessNumber"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROLLART_STATE_DIR", str(state))
        environment.delenv("PREFECT_API_URL", raising=False)
        with (
            prefect_server(),
            train_process(beside, stores / "files", driver_environment(state)) as other,
        ):
            summary = train(small_config(stores / "asynchronous", "asynchronous"))
            assert other.wait(600) == 0, other.output
            synchronous = find_run(str(stores / "synchronous"), "latest")
            yield {
                "asynchronous": Finished(
                    summary,
                    ObjectStore.open(str(stores / "asynchronous")),
                    flow_run_named("train", "asynchronous"),
                ),
                "synchronous": Finished(
                    synchronous.folder().get_json("summary.json"),
                    synchronous.root(),
                    flow_run_named("train", "synchronous"),
                ),
            }


@pytest.fixture
def finished(both: dict[str, Finished]) -> Finished:
    return both["asynchronous"]


def test_both_runs_end_well_and_share_nothing_but_the_server(both: dict[str, Finished]) -> None:
    for name, num_iterations in (("asynchronous", 3), ("synchronous", 2)):
        run = both[name]
        assert run.flow_run.state is not None and run.flow_run.state.is_completed()
        assert iterations(find_run(run.store.url, run.run_id)) == list(range(num_iterations))


def test_the_summary_says_what_the_run_did(finished: Finished) -> None:
    summary = finished.summary
    assert summary == finished.folder.get_json("summary.json")
    assert sorted(summary["families"]) == FAMILIES
    for when in ("success_before", "success_after"):
        assert sorted(summary[when]) == sorted([*FAMILIES, "mean"])
        assert all(0.0 <= value <= 1.0 for value in summary[when].values())
    assert summary["num_iterations"] == 3
    assert summary["num_trajectories"] == 3 * 5 * 4  # 5 groups of 4 in every batch
    assert summary["num_tokens"] > summary["num_trajectories"]
    assert summary["wall_s"] > 0
    assert summary["store"] == finished.folder.url
    assert finished.folder.get("learning_curve.png").startswith(b"\x89PNG")


def test_polars_and_pyarrow_read_the_trajectories_as_they_are(finished: Finished) -> None:
    folder = finished.folder.local_path("trajectories")
    assert folder is not None
    frame = polars.scan_ipc(folder / "*.arrow").collect()
    table = pyarrow.dataset.dataset(sorted(folder.glob("*.arrow")), format="ipc").to_table()
    assert frame.height == table.num_rows
    assert sorted(frame["family"].unique()) == FAMILIES
    by_split = dict(frame.group_by("split").len().rows())
    assert by_split["eval"] == 2 * NUM_EPISODES * len(FAMILIES)
    assert by_split["train"] >= finished.summary["num_trajectories"]
    several_turns = frame.filter(polars.col("turns").list.len() > 1)
    assert sorted(several_turns["family"].unique()) == FAMILIES
    classes = quickstart_families()
    used = frame.explode("turns").select("family", polars.col("turns").struct.field("hardware_class")).unique()
    assert dict(used.rows()) == {family: classes[family].hardware_class for family in FAMILIES}
    assert len(used) == len(FAMILIES), "each family's turns were generated on the class that it names"


def test_every_batch_has_its_manifest_and_no_prompt_is_trained_twice(finished: Finished) -> None:
    trained = trained_groups(finished.store, finished.run_id)
    assert list(trained) == [0, 1, 2]
    for groups in trained.values():
        families = [family for family, _ in groups]
        assert sorted(families) == sorted([*FAMILIES, "guess_number"])
    prompts = [group for groups in trained.values() for group in groups]
    assert len(set(prompts)) == len(prompts)


def test_every_version_is_published_whole(finished: Finished) -> None:
    weights = WeightStore(finished.store, finished.run_id)
    assert weights.versions() == [0, 1, 2, 3]
    assert weights.latest() == 3
    manifests = [weights.manifest(version) for version in weights.versions()]
    files = [manifest.files["model.safetensors"].sha256 for manifest in manifests]
    for metrics, (before, after) in zip(read_metrics(finished.folder), pairwise(files), strict=True):
        # A batch whose groups all have equal rewards changes nothing, and so young a policy may produce one.
        assert (before != after) == (metrics["optimizer_steps"] > 0)
    assert sampled_versions(trajectory_rows(finished.store, finished.run_id)) <= {0, 1, 2, 3}


def test_trained_tokens_are_at_most_one_version_old(finished: Finished) -> None:
    lags = lags_of_trained_tokens(finished.store, finished.run_id)
    assert set(lags) == {0, 1}, "beyond the bound, or rollouts did not overlap with training"


def test_a_synchronous_run_trains_on_its_own_version_only(both: dict[str, Finished]) -> None:
    """S1."""
    run = both["synchronous"]
    assert set(lags_of_trained_tokens(run.store, run.run_id)) == {0}
    rows = trajectory_rows(run.store, run.run_id).filter(pyarrow.compute.field("split") == "train")
    started = rows.select(["group_id", "token_versions"]).to_pylist()
    by_version = Counter(version for version, _ in {(max(row["token_versions"]), row["group_id"]) for row in started})
    assert max(by_version.values()) <= 5, "more than one batch was in flight"


@pytest.mark.parametrize("name", ["asynchronous", "synchronous"])
def test_reward_replicas_judged_what_the_pool_judges(both: dict[str, Finished], name: str) -> None:
    run = both[name]
    replicas = [json.loads(run.folder.get(key)) for key in run.folder.list("rewards/replicas/")]
    assert replicas, "no reward replica came"
    rewards = rewards_table(run.store, run.run_id)
    scorers = {tuple(pair.values()) for pair in rewards.select(["family", "scorer"]).to_pylist()}
    assert scorers == set(POOL_SCORERS.items())
    assert set(rewards["failure"].to_pylist()) == {None}
    judged = rewarded_trajectories(run.store, run.run_id, columns=["trajectory_id", "family"])
    final = dict(zip(judged["trajectory_id"].to_pylist(), judged["final_reward"].to_pylist(), strict=True))
    for version in trained_groups(run.store, run.run_id):
        for group in read_batch(run.store, run.run_id, version).groups:
            for member in group.members:
                assert member.reward == final[member.trajectory_id]


@pytest.mark.parametrize(("name", "num_iterations"), [("asynchronous", 3), ("synchronous", 2)])
def test_stages_are_task_runs_on_workers_of_their_class(
    both: dict[str, Finished], name: str, num_iterations: int
) -> None:
    """S19."""
    assert_stages_ran_on_their_workers(both[name].flow_run, num_iterations, streamed=name == "synchronous")


def test_streamed_updates_begin_before_their_batch_is_complete(both: dict[str, Finished]) -> None:
    run = both["synchronous"]
    metrics = read_metrics(run.folder)
    assert any(row.get("num_streamed_groups", 0) for row in metrics), "guess_number takes its time, the others wait"
    for row, groups in zip(metrics, trained_groups(run.store, run.run_id).values(), strict=True):
        assert row.get("num_streamed_groups", 0) <= len(groups) == 5
        assert row.get("tokens/streamed", 0) <= row["tokens/processed"]
        assert row["optimizer_steps"] <= 1


def test_logs_of_dask_workers_reach_the_flow_run(finished: Finished) -> None:
    for version, run in enumerate(subflow_runs(finished.flow_run.id, "rl-iteration")):
        wait_for(
            f"worker log lines in {run.name}",
            lambda run=run, version=version: any(
                line.startswith(f"batch {version}: 5 groups, 20 trajectories") for line in log_lines(run)
            ),
            30,
        )


def test_artifacts_are_there_for_people(finished: Finished) -> None:
    parents = [finished.flow_run.id, *(run.id for run in subflow_runs(finished.flow_run.id, "rl-iteration"))]
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=parents))
        )
    data = {str(artifact.key).removesuffix(f"-{finished.run_id}"): str(artifact.data) for artifact in artifacts}
    assert Counter(artifact.type for artifact in artifacts) == {"progress": 1, "table": 3, "markdown": 2}
    assert float(data["progress"]) == 100.0
    assert finished.folder.url in data["store"]
    assert "data:image/png;base64," in data["curve"]
    assert sorted(row["family"] for row in json.loads(data["families"])) == FAMILIES
