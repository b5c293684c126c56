"""`deterministic: true`, end to end on embedded pools: the same run with one rollout worker and with two, while
environments take random times; once more behind a resume; and beside it what happens without it. The runs use the
one-off pipeline, whose lag and whose loads between batches are checked on the way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from flows.config import RunConfig
from flows.server import prefect_server
from flows.train import train
from resources.object_store import ObjectStore
from resources.telemetry.metrics import read_metrics
from resources.trajectories.batch import read_batch
from resources.trajectories.digest import run_digests
from resources.trajectories.store import read_trajectories
from tests.integration.stack_runs import small_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DELAYED = "tests.integration.delayed_environments"
COMMON = {"groups_per_iteration": 2, "group_size": 4, "max_new_tokens": 12}
FAMILIES = {
    "guess": {**COMMON, "environment": f"{DELAYED}:DelayedGuessNumber", "hardware_class": "compute"},
    "sums": {
        **COMMON,
        "environment": f"{DELAYED}:DelayedCalculator",
        "hardware_class": "bandwidth",
        "scorer": "exact_answer",
    },
}
NUM_ITERATIONS = 2


@dataclass(frozen=True)
class Finished:
    store: ObjectStore
    run_id: str

    def digests(self) -> dict[str, dict[int, str]]:
        return run_digests(self.store, self.run_id)

    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.store.sub(f"runs/{self.run_id}"))


def configure(store: str, name: str, num_workers: int, *, deterministic: bool) -> RunConfig:
    config = small_config(
        store,
        name,
        families=FAMILIES,
        num_iterations=NUM_ITERATIONS,
        deterministic=deterministic,
        rollout={"pipeline": "one_off", "length_finish": "step"},
        warm_start={"num_steps": 60},
        evaluation={"before": False, "after": False},
        checkpoint_keep=NUM_ITERATIONS + 1,
    )
    classes = {
        **config.pools.classes,
        "cpu": config.pools.classes["cpu"].model_copy(update={"num_workers": num_workers}),
    }
    return config.model_copy(update={"pools": config.pools.model_copy(update={"classes": classes})})


def play(store: str, name: str, num_workers: int, *, deterministic: bool) -> Finished:
    summary = train(configure(store, name, num_workers, deterministic=deterministic))
    return Finished(ObjectStore.open(store), summary["run_id"])


def resume(finished: Finished, store: str, copy: str) -> Finished:
    """The same run as it lay there when iteration 0 alone was recorded, gone on with in a copy of its store. Batches
    and weights behind that are left over, as they are when a driver is killed."""
    shutil.copytree(store, copy)
    found = Finished(ObjectStore.open(copy), finished.run_id)
    for iteration in range(1, NUM_ITERATIONS):
        found.store.delete(f"runs/{found.run_id}/iterations/{iteration:06d}.json")
    train(configure(copy, "one", 1, deterministic=True), resume=found.run_id)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Finished]]:
    store = str(tmp_path_factory.mktemp("store"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROLLART_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        environment.delenv("PREFECT_API_URL", raising=False)
        with prefect_server():
            one = play(store, "one", 1, deterministic=True)
            yield {
                "one": one,
                "resumed": resume(one, store, str(tmp_path_factory.mktemp("copy") / "store")),
                "two": play(store, "two", 2, deterministic=True),
                "default": play(store, "default", 2, deterministic=False),
            }


def test_one_worker_and_two_do_the_same(runs: dict[str, Finished]) -> None:
    one, two = runs["one"].digests(), runs["two"].digests()
    assert sorted(one["batches"]) == list(range(NUM_ITERATIONS)) and sorted(one["weights"]) == [
        *range(NUM_ITERATIONS + 1)
    ]
    assert one == two
    assert sum(row["optimizer_steps"] for row in runs["one"].rows()) > 0, "nothing was learned that could differ"
    assert len(set(one["weights"].values())) > 1
    groups = [[group.group_id for group in read_batch(r.store, r.run_id, 1).groups] for r in (runs["one"], runs["two"])]
    assert groups[0] == groups[1] == ["guess-000002", "guess-000003", "sums-000002", "sums-000003"]


def test_a_resumed_run_is_the_same(runs: dict[str, Finished]) -> None:
    one, resumed = runs["one"], runs["resumed"]
    assert resumed.digests() == one.digests()
    recorded = [[row["recorded_at"] for row in run.rows()] for run in (one, resumed)]
    assert [old == new for old, new in zip(*recorded, strict=True)] == [True, False], "iteration 1 was done anew"


def test_both_workers_played(runs: dict[str, Finished]) -> None:
    files = [key.rsplit("/", 1)[-1] for key in runs["two"].store.list(f"runs/{runs['two'].run_id}/trajectories/")]
    assert {name.split("-")[1] for name in files} == {"0", "1"}, files


def test_without_it_the_same_seed_gives_another_run(runs: dict[str, Finished]) -> None:
    """Negative control."""
    assert runs["default"].digests()["batches"] != runs["one"].digests()["batches"]


def test_every_trained_token_is_one_version_old(runs: dict[str, Finished]) -> None:
    for run in runs.values():
        for version in range(NUM_ITERATIONS):
            members = [m for group in read_batch(run.store, run.run_id, version).groups for m in group.members]
            for row in read_trajectories(run.store, [member.ref for member in members]):
                assert set(row.token_versions[row.loss_mask].tolist()) <= {max(0, version - 1)}
        assert all(row["weights/load_waited_s"] >= 0 for row in run.rows())
