"""Batch manifests: written once, the same again is fine, another one is an error."""

from __future__ import annotations

import dataclasses

import pytest

from resources.object_store import ObjectStore
from resources.rollout.messages import Batch, BatchGroup, BatchMember
from resources.trajectories.batch import BatchConflict, batch_versions, read_batch, write_batch
from resources.trajectories.trajectory import TrajectoryRef

SCORED = BatchMember("run/f-1/0/0", TrajectoryRef("runs/run/trajectories/a.arrow", 3), 0.9, True, "unit_tests", "1", 11)
UNSCORED = BatchMember(
    "run/f-1/1/0", TrajectoryRef("runs/run/trajectories/b.arrow", 0), None, None, "unit_tests", "1", None
)
GROUP = BatchGroup("f-1", "f", 7, (SCORED, UNSCORED))
BATCH = Batch("run", 12, (GROUP, BatchGroup("g-1", "g", 8, (SCORED,))), {"evicted": {"f": 2}, "lag": [0, 1]})


@pytest.fixture
def store(store_url: str) -> ObjectStore:
    return ObjectStore.open(store_url)


def test_a_batch_round_trips(store: ObjectStore) -> None:
    assert write_batch(store, BATCH) == "runs/run/batches/000012.json"
    assert read_batch(store, "run", 12) == BATCH
    assert batch_versions(store, "run") == [12]


def test_an_equal_batch_may_be_written_again(store: ObjectStore) -> None:
    write_batch(store, BATCH)
    write_batch(store, dataclasses.replace(BATCH))
    assert read_batch(store, "run", 12) == BATCH


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": (GROUP,)}, r"groups \['g-1'\] there, \[\] here"),
        ({"groups": (dataclasses.replace(GROUP, members=(SCORED,)), BATCH.groups[1])}, "members of group 'f-1'"),
        ({"counters": {}}, "differs: counters"),
    ],
)
def test_another_batch_of_the_same_version_is_an_error(
    store: ObjectStore, change: dict[str, object], message: str
) -> None:
    write_batch(store, BATCH)
    with pytest.raises(BatchConflict, match=message):
        write_batch(store, dataclasses.replace(BATCH, **change))  # type: ignore[arg-type]
    assert read_batch(store, "run", 12) == BATCH


def test_a_batch_that_is_not_json_is_refused_before_it_is_written(store: ObjectStore) -> None:
    with pytest.raises(ValueError, match="counters must be JSON"):
        write_batch(store, dataclasses.replace(BATCH, counters={"reward": float("nan")}))
    with pytest.raises(KeyError, match=r"batches/000012\.json"):
        read_batch(store, "run", 12)
