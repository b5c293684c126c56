"""The gate with a share window: late groups are owed, families keep what they are due."""

from __future__ import annotations

import json

import pytest

from resources.rollout.config import RolloutConfig
from resources.rollout.gate_events import (
    BatchRequested,
    FirstSampled,
    VersionLoaded,
)
from resources.rollout.staleness import StalenessGate
from tests.gate_driver import Driver, done, family


def finish(driver: Driver, *group_ids: str, version: int = 0) -> None:
    for group_id in group_ids:
        for start in [start for start in driver.starts if start.group_id == group_id]:
            driver(done(start, float(start.member), version))


def test_a_window_lets_a_batch_go_without_a_late_group_that_is_trained_later():
    """The late family keeps its share of what is trained; its group is not thrown away, and never too old."""
    driver = Driver({"fast": family(2), "slow": family(2)}, max_staleness=1, share_window=3)
    finish(driver, *(f"fast-{i:06d}" for i in range(4)), "slow-000001")
    driver(BatchRequested(0))
    assert [g.group_id for g in driver.batches[0].groups] == [
        "fast-000000",
        "fast-000001",
        "fast-000002",
        "slow-000001",
    ]
    assert driver.batches[0].counters["owed_groups/slow"] == 1
    assert driver.batches[0].counters["owed_groups/fast"] == -1
    assert driver.gate.missing() == {"slow": 3}


def test_what_is_owed_counts_for_admission():
    """Owed groups are not started twice: accepted + running never exceeds the budget; ahead ones are not either."""
    driver = Driver({"fast": family(2), "slow": family(2)}, max_staleness=1, share_window=3)
    finish(driver, *(f"fast-{i:06d}" for i in range(4)), "slow-000001")
    driver(BatchRequested(0))
    gate = driver.gate
    assert [gate.admission.budget(name) for name in ("fast", "slow")] == [4, 4]
    assert (gate.admission.accepted("fast"), gate.admission.accepted("slow")) == (4, 1), (
        "trained and queued ones, whatever the quota"
    )
    assert len(gate.families["slow"].running) == 3
    driver(VersionLoaded(1))
    assert len(gate.families["fast"].running) == 2 and len(gate.families["slow"].running) == 5
    finish(driver, "slow-000000", "slow-000002", "slow-000003", version=0)
    driver(BatchRequested(1))
    taken = [g.group_id for g in driver.batches[1].groups]
    assert taken == ["fast-000003", "slow-000000", "slow-000002", "slow-000003"], "what was owed is paid back"
    assert driver.batches[1].counters["lag_max/slow"] == 1
    assert gate.shares.families["slow"].owed == 0


def test_a_late_group_that_is_too_old_is_evicted_and_its_place_stays_owed():
    driver = Driver({"fast": family(2), "slow": family(2)}, max_staleness=1, share_window=3)
    for start in driver.starts:
        if start.group_id == "slow-000000":
            driver(FirstSampled(start.trajectory_id, 0))
    finish(driver, *(f"fast-{i:06d}" for i in range(4)), "slow-000001", "slow-000002", version=0)
    driver(BatchRequested(0))
    driver(VersionLoaded(1))
    finish(driver, "fast-000004", "fast-000005", "slow-000003", version=1)
    driver(BatchRequested(1))
    driver(VersionLoaded(2))
    assert driver.gate.families["slow"].counts["evicted_groups"] == 1
    assert driver.gate.shares.families["slow"].owed == 1
    assert (driver.gate.admission.accepted("slow"), driver.gate.admission.budget("slow")) == (3, 8)
    assert len(driver.gate.families["slow"].running) == 5, "the evicted prompt again, and four more"


def test_debts_survive_a_resume():
    families = {"fast": family(2), "slow": family(2)}
    driver = Driver(families, max_staleness=1, share_window=3)
    finish(driver, *(f"fast-{i:06d}" for i in range(4)), "slow-000001")
    driver(BatchRequested(0))
    state = json.loads(json.dumps(driver.gate.snapshot()))
    trained = Driver(families, state=state, version=1, max_staleness=1, share_window=3)
    assert trained.gate.shares.families["slow"].owed == 1 and trained.gate.admission.accepted("slow") == 1
    untrained = Driver(families, state=state, version=0, max_staleness=1, share_window=3)
    assert untrained.gate.shares.families["slow"].owed == 0
    untrained(BatchRequested(0))
    assert untrained.batches[0].groups == driver.batches[0].groups, "the same batch again"


def test_without_a_window_debts_of_a_resumed_run_are_paid_at_once():
    families = {"fast": family(2), "slow": family(2)}
    driver = Driver(families, max_staleness=1, share_window=3)
    finish(driver, *(f"fast-{i:06d}" for i in range(4)), "slow-000001")
    driver(BatchRequested(0))
    gate = StalenessGate("run", families, RolloutConfig(max_staleness=1))
    gate.restore(json.loads(json.dumps(driver.gate.snapshot())), version=1)
    assert gate.missing() == {"slow": 3}


@pytest.mark.parametrize("window", [None, 4])
def test_families_of_tenfold_speed_keep_their_trained_shares(window):
    """One family finishes a group at every tick, the other at every tenth: trained shares are equal over any window."""
    names = ("fast", "slow")
    driver = Driver({name: family(3, size=1) for name in names}, max_staleness=2, share_window=window)
    trained = []
    for tick in range(1, 600):
        for name in names if tick % 10 == 0 else ("fast",):
            playing = driver.gate.families[name].running
            if playing:
                group = next(iter(playing.values()))
                start = next(s for s in driver.starts if s.group_id == group.group_id)
                driver(done(start, 1.0, driver.gate.version))
        driver(BatchRequested(driver.gate.next_batch))
        while len(driver.batches) > len(trained):
            batch = driver.batches[len(trained)]
            trained.append({name: sum(g.family == name for g in batch.groups) for name in names})
            driver(VersionLoaded(batch.version + 1))
    assert len(trained) == 59 // 3 or window
    for first in range(len(trained) - (window or 1) + 1):
        of_window = trained[first : first + (window or 1)]
        for name in names:
            groups = sum(batch[name] for batch in of_window)
            assert abs(groups - 3 * len(of_window)) <= (1 if window else 0)
    assert not driver.gate.families["fast"].counts["evicted_groups"], "the fast family is paced, not discarded"
