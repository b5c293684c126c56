"""Pipelines in logical time: every batch is sampled whole under the version that its number implies."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resources.rollout.config import RolloutConfig
from resources.rollout.gate_events import BatchRequested, FirstSampled, Start, VersionLoaded
from resources.rollout.logical_time import LogicalSchedule
from tests.gate_driver import Driver, done, failed, family

ONE_OFF = dict(pipeline="one_off", max_staleness=1)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 4), st.data())
def test_the_two_rules_never_wait_for_each_other_and_fix_every_version(lag: int, data: st.DataObject) -> None:
    schedule = LogicalSchedule(lag)
    version = num_begun = num_complete = num_trained = 0
    for _ in range(60):
        possible = []
        if num_begun < schedule.num_open(version, num_complete):
            possible.append("begin")
        if num_complete < num_begun:
            possible.append("complete")
        if num_trained < num_complete and num_trained == version:
            possible.append("train")
        if version < num_trained and schedule.may_load(version + 1, num_complete):
            possible.append("load")
        assert possible, "a dead schedule"
        match data.draw(st.sampled_from(possible)):
            case "begin":
                assert num_begun == num_complete, "one batch at a time"
                assert version == schedule.sampled_under(num_begun)
                num_begun += 1
            case "complete":
                assert version == schedule.sampled_under(num_complete), "a load came into a batch"
                num_complete += 1
            case "train":
                assert num_trained - schedule.sampled_under(num_trained) == min(lag, num_trained)
                num_trained += 1
            case "load":
                version += 1


def test_only_the_one_off_pipeline_has_a_schedule() -> None:
    assert LogicalSchedule.of(RolloutConfig()) is None
    assert LogicalSchedule.of(RolloutConfig(pipeline="synchronous", max_staleness=0)) is None
    assert LogicalSchedule.of(RolloutConfig(pipeline="one_off")) == LogicalSchedule(1)
    with pytest.raises(ValueError, match="set it to 1"):
        RolloutConfig(pipeline="one_off", max_staleness=2)


def finish(driver: Driver, starts: list[Start], version: int) -> None:
    for start in starts:
        driver(done(start, version=version))


def test_the_next_batch_begins_when_one_is_complete_and_the_load_waits_for_it() -> None:
    driver = Driver({"a": family(groups=1), "b": family(groups=2)}, num_batches=3, **ONE_OFF)
    first = driver.starts[:]
    assert [start.group_id for start in first[::2]] == ["a-000000", "b-000000", "b-000001"]
    finish(driver, first[:-1], 0)
    assert len(driver.starts) == 6, "a family whose groups are there waits for the other one's"
    finish(driver, first[-1:], 0)
    second = driver.starts[6:]
    assert len(second) == 6, "batch 1 is begun under version 0 before batch 0 is asked for"
    driver(BatchRequested(0))
    assert not driver.gate.admission.may_load(1)
    finish(driver, second, 0)
    assert driver.gate.admission.may_load(1) and len(driver.starts) == 12, "batch 2 belongs to version 1"
    driver(VersionLoaded(1))
    third = driver.starts[12:]
    assert len(third) == 6
    driver(BatchRequested(1))
    assert driver.batches[1].counters["lag/a"] == {"1": 2} and driver.batches[1].counters["lag/b"] == {"1": 4}
    finish(driver, third, 1)
    assert driver.gate.admission.may_load(2)
    driver(VersionLoaded(2))
    driver(BatchRequested(2))
    assert driver.gate.admission.may_load(3), "no batch comes after the last one, so its load waits for none"
    assert len(driver.starts) == 18


@pytest.mark.parametrize("stale_policy", ["evict", "finish_masked"])
def test_a_deterministic_batch_takes_nothing_from_an_engine_that_missed_a_switch(stale_policy: str) -> None:
    """Within the bound, and out of the schedule: played again under the same id of its group, before the next load."""
    driver = Driver({"a": family(groups=1)}, deterministic=True, max_staleness=2, stale_policy=stale_policy)
    for _ in range(3):  # batches 0, 1, 2 under version 0
        finish(driver, driver.take_starts(), 0)
    driver(BatchRequested(0))
    driver(VersionLoaded(1))
    first, second = driver.take_starts()
    assert first.group_id == "a-000003"
    driver(done(first, version=1))
    driver(done(second, version=0))
    again = driver.take_starts()
    assert [(start.group_id, start.attempt) for start in again] == [("a-000003", 1)] * 2
    assert not driver.gate.admission.may_load(2)
    driver(FirstSampled(again[0].trajectory_id, 0))
    assert [cancel.trajectory_id for cancel in driver.cancels] == [start.trajectory_id for start in again]
    finish(driver, driver.take_starts(), 1)
    assert driver.gate.admission.may_load(2)
    assert driver.gate.families["a"].counts["evicted_groups"] == 2


def test_a_resume_at_a_version_goes_on_in_the_same_schedule() -> None:
    driver = Driver({"a": family(groups=1)}, **ONE_OFF)
    finish(driver, driver.starts[:2], 0)
    driver(BatchRequested(0))
    finish(driver, driver.starts[2:4], 0)
    driver(VersionLoaded(1))
    driver(done(driver.starts[4], version=1))
    resumed = Driver({"a": family(groups=1)}, state={**driver.gate.snapshot(), "life": 1}, version=1, **ONE_OFF)
    assert [(s.group_id, s.member) for s in resumed.starts] == [("a-000002", 1)], "what was scored is kept"
    resumed(BatchRequested(1))
    assert resumed.batches[0].counters["lag/a"] == {"1": 2}
    assert not resumed.gate.admission.may_load(2)
    resumed(done(resumed.starts[0], version=1))
    assert resumed.gate.admission.may_load(2)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_every_trained_token_is_one_version_old_whatever_the_order_of_events(data: st.DataObject) -> None:
    """Random completion orders, failures and dynamic sampling; loads and takes whenever they may come."""
    dynamic = data.draw(st.booleans())
    driver = Driver(
        {"a": family(groups=2, redundant_groups=data.draw(st.integers(0, 1))), "b": family(groups=1, size=3)},
        dynamic_sampling=dynamic,
        max_replaced_groups=10_000,
        **ONE_OFF,
    )
    gate, trained = driver.gate, 0
    for _ in range(150):
        possible: list[tuple[str, Start | None]] = [
            ("finish", s) for s in driver.starts if s.trajectory_id in gate.seats
        ]
        if trained == gate.next_batch and not gate.missing() and gate.next_batch == gate.version:
            possible.append(("take", None))
        if gate.next_batch > gate.version and gate.admission.may_load(gate.version + 1):
            possible.append(("load", None))
        assert possible, "nothing runs, and nothing may be done about it"
        what, start = data.draw(st.sampled_from(possible))
        if what == "take":
            driver(BatchRequested(gate.next_batch))
            trained = gate.next_batch
        elif what == "load":
            driver(VersionLoaded(gate.version + 1))
        else:
            assert start is not None
            if data.draw(st.integers(0, 9)) == 0:
                driver(failed(start))
            else:
                driver(done(start, reward=float(data.draw(st.integers(0, 1))), version=gate.version))
    for batch in driver.batches:
        versions = {member.oldest_version for group in batch.groups for member in group.members}
        assert versions == {max(0, batch.version - 1)}


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 3), st.sampled_from(["evict", "finish_masked"]))
def test_a_deterministic_batch_is_of_its_one_version_whatever_engines_and_drivers_do(
    rng: random.Random, lag: int, stale_policy: str
) -> None:
    """Random completion orders, failures, engines that missed a switch, and resumes, with invariants after every event:
    each batch holds the groups that its number implies, every token of them of the version that it implies."""
    rng = random.Random(rng.getrandbits(32))
    families = {"a": family(groups=2), "b": family(groups=1, size=3)}
    config = dict(
        deterministic=True, max_staleness=lag, max_reissues=1000, max_member_retries=1000, stale_policy=stale_policy
    )  # fmt: skip
    driver, batches, started = Driver(families, **config), {}, {}
    for life in range(1, 121):
        gate = driver.gate
        started |= {start.trajectory_id: start for start in driver.take_starts()}
        possible = ["resume"] if rng.random() < 0.05 else []
        possible += ["finish"] * len(gate.seats)
        possible += ["take"] if not gate.missing() and gate.next_batch == gate.version else []
        possible += ["load"] if gate.next_batch > gate.version and gate.admission.may_load(gate.version + 1) else []
        assert possible, "nothing runs, and nothing may be done about it"
        match rng.choice(possible):
            case "take":
                driver(BatchRequested(gate.next_batch))
                batches[driver.batches[-1].version] = driver.batches[-1]
            case "load":
                driver(VersionLoaded(gate.version + 1))
            case "resume":
                state = {**json.loads(json.dumps(gate.snapshot())), "life": life}
                driver = Driver(families, state=state, version=gate.version, **config)
            case _:
                start = started[rng.choice(list(gate.seats))]
                if rng.random() < 0.1:
                    driver(failed(start))
                else:
                    behind = rng.random() < 0.2
                    driver(done(start, float(start.member), max(0, gate.version - behind)))
    assert batches
    for number, batch in batches.items():
        assert {member.oldest_version for group in batch.groups for member in group.members} == {max(0, number - lag)}
        assert [group.group_id for group in batch.groups] == [
            f"a-{2 * number:06d}", f"a-{2 * number + 1:06d}", f"b-{number:06d}",
        ]  # fmt: skip
        assert [len(group.members) for group in batch.groups] == [2, 2, 3]
