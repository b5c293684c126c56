"""What a resumed gate goes on from: nothing trained twice, nothing skipped, no id used again."""

from __future__ import annotations

import json

import pytest

from resources.rewards.base import Score
from resources.rollout.gate_events import (
    BatchRequested,
    ScoreArrived,
    ScoreOverdue,
    VersionLoaded,
)
from tests.gate_driver import Driver, done, failed, family


def test_resume_starts_without_a_burst():
    """S12: version 100, batch 8, staleness 2: at most 24 groups start; accepted = version * groups + unconsumed."""
    driver = Driver({"a": family(8)}, state={"version": 100}, max_staleness=2)
    assert len(driver.group_ids()) == 24
    assert driver.group_ids()[0] == "a-000800", "the prompts of the trained batches are not issued again"
    driver.play_all(100)
    resumed = Driver({"a": family(8)}, state=json.loads(json.dumps(driver.gate.snapshot())), max_staleness=2)
    assert resumed.group_ids() == [] and resumed.gate.admission.accepted("a") == 824


def test_resume_keeps_scored_work_and_issues_the_rest_again_once():
    """S9: 12 groups with 96 members in flight or scored; after the resume each prompt is trained exactly once."""
    driver = Driver({"a": family(6, size=8)}, max_staleness=1)
    starts = driver.take_starts()
    assert len(starts) == 96
    for start in starts[:40]:  # five complete groups
        driver(done(start, float(start.member)))
    driver(done(starts[40], 1.0))
    driver(done(starts[41], None))
    state = json.loads(json.dumps(driver.gate.snapshot()))
    resumed = Driver({"a": family(6, size=8)}, state=state, max_staleness=1)
    again = resumed.take_starts()
    assert len(again) == 96 - 42
    assert all(start.attempt == 1 for start in again)
    resumed(ScoreArrived(Score(starts[41].trajectory_id, "s", "2", 0.0)))
    for start in again:
        resumed(done(start, float(start.member)))
    resumed(BatchRequested(0))
    resumed(BatchRequested(1))
    trained = [g.group_id for batch in resumed.batches for g in batch.groups]
    assert sorted(trained) == [f"a-{i:06d}" for i in range(12)]
    refs = [m.trajectory_id for batch in resumed.batches for g in batch.groups for m in g.members]
    assert len(set(refs)) == 96


@pytest.mark.parametrize("trained", [False, True])
def test_a_batch_taken_but_not_trained_is_neither_skipped_nor_trained_twice(trained):
    driver = Driver({"a": family(2)}, max_staleness=1)
    driver.play_all(0)
    driver(BatchRequested(0))
    state = json.loads(json.dumps(driver.gate.snapshot()))
    resumed = Driver({"a": family(2)}, state=state, version=1 if trained else 0, max_staleness=1)
    resumed(BatchRequested(1 if trained else 0))
    taken = [g.group_id for g in resumed.batches[0].groups]
    assert taken == (["a-000002", "a-000003"] if trained else ["a-000000", "a-000001"])


def test_ids_of_trajectories_started_after_the_snapshot_never_return():
    """S26 across a resume: a score of the killed driver's trajectory must not be taken for the new one's."""
    driver = Driver({"a": family(2)}, max_staleness=1)
    starts = driver.take_starts()
    driver(done(starts[0], None, scorer="s"))  # awaits its score when the state is saved
    state = json.loads(json.dumps(driver.gate.snapshot()))
    for start in starts[1:]:
        driver(failed(start))  # retried, unknown to the snapshot
    driver.play_all(0)
    driver(BatchRequested(0))
    driver(VersionLoaded(1))  # new groups, unknown to the snapshot
    before = {*(start.trajectory_id for start in starts), *driver.gate.seats}
    for life in (1, 2):  # the first resume is killed before it saves anything
        resumed = Driver({"a": family(2)}, state={**state, "life": life}, max_staleness=1)
        again = {start.trajectory_id for start in resumed.take_starts()}
        assert len(again) == 7, "all but the one that awaits its score"
        resumed(VersionLoaded(1))
        again |= {start.trajectory_id for start in resumed.take_starts()}
        resumed(ScoreOverdue(starts[0].trajectory_id, "no score"))
        again |= {start.trajectory_id for start in resumed.take_starts()}
        assert not again & before
        before |= again


def test_a_resume_refuses_families_it_does_not_know():
    driver = Driver({"a": family()})
    with pytest.raises(ValueError, match=r"has the families \['a'\]"):
        Driver({"b": family()}, state=driver.gate.snapshot())


def test_a_resumed_service_never_hands_out_a_batch_of_the_past():
    """S11: resumed at 5, nothing starts for batches 1 to 5, and every trained token has version 5."""
    driver = Driver({"a": family(2)}, state={"version": 5}, max_staleness=0)
    assert driver.group_ids() == ["a-000010", "a-000011"], "prompts of the batches 0 to 4 are not played again"
    with pytest.raises(ValueError, match="batch 4 was asked for, but the next one is batch 5"):
        driver(BatchRequested(4))
    driver.play_all(5)
    driver(BatchRequested(5))
    assert {m.oldest_version for g in driver.batches[0].groups for m in g.members} == {5}


def test_an_older_format_of_the_state_is_refused():
    state = Driver({"a": family()}).gate.snapshot()
    with pytest.raises(ValueError, match="has format 1, this version reads 2"):
        Driver({"a": family()}, state={**state, "format": 1})
