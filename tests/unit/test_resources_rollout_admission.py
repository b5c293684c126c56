"""Admission: how many groups of each family the gate starts."""

from __future__ import annotations

from resources.rollout.gate_events import (
    BatchRequested,
    VersionLoaded,
)
from tests.gate_driver import Driver, done, family


def test_admission_is_bounded_per_family_in_groups():
    """start <= (max_staleness + version + 1) * groups - accepted - running; families take turns."""
    driver = Driver({"a": family(2), "b": family(3)}, max_staleness=1)
    assert driver.group_ids()[:4] == ["a-000000", "b-000000", "a-000001", "b-000001"]
    assert [g for g in driver.group_ids() if g.startswith("a")] == [f"a-{i:06d}" for i in range(4)]
    assert [g for g in driver.group_ids() if g.startswith("b")] == [f"b-{i:06d}" for i in range(6)]
    driver.play_all(0)
    assert driver.gate.admission.accepted("a") == 4 and driver.gate.admission.admissible("a") == 0
    driver(BatchRequested(0))
    assert not driver.starts, "taking a batch frees nothing: only a new version does"
    driver(VersionLoaded(1))
    assert len([g for g in driver.group_ids() if g.startswith("a")]) == 2


def test_nothing_is_started_that_no_batch_could_hold():
    """Three batches of two groups at alpha 1: six groups in all, however far the version moves."""
    driver = Driver({"f": family()}, max_staleness=1, num_batches=3)
    for version in range(3):
        for start in [s for s in driver.starts if s.trajectory_id in driver.gate.seats]:
            driver(done(start, float(start.member), version=version))
        driver(BatchRequested(version))
        driver(VersionLoaded(version + 1))
    assert len(driver.batches) == 3
    assert len({start.group_id for start in driver.starts}) == 6
    assert not driver.gate.seats


def test_a_service_that_only_evaluates_starts_no_training_group():
    driver = Driver({"f": family()}, state={"version": 7}, num_batches=7)
    assert not driver.starts


def test_admission_is_bounded_by_concurrency():
    driver = Driver({"a": family(4, max_concurrent_groups=3)}, max_staleness=1)
    assert len(driver.group_ids()) == 3
    for start in [s for s in driver.take_starts() if s.group_id == "a-000000"]:
        driver(done(start))
    assert driver.group_ids() == ["a-000003"]
