"""Pools of prompts and curricula: orders, success so far, what is left out, shares that move, resumes."""

from __future__ import annotations

import json

import pytest

from resources.environments.seeds import prompt_order
from resources.rollout.config import RolloutConfig
from resources.rollout.curriculum import InformativePrompts, SuccessRecord, make_curriculum
from resources.rollout.gate_events import BatchRequested, Opened, Start, VersionLoaded
from resources.rollout.prompts import Prompts
from resources.rollout.staleness import StalenessGate
from tests.gate_driver import Driver, done, family

HERE = "tests.unit.test_resources_rollout_curriculum"


class HalfToTheWorst:
    """Gives the family with the lowest success two groups of the one with the highest."""

    def quotas(self, batch, configured, success):
        if not all(record.num_groups for record in success.values()):
            return configured
        worst, best = (pick(success, key=lambda name: success[name].success_rate) for pick in (min, max))
        return {**configured, worst: configured[worst] + 2, best: configured[best] - 2}

    def plays(self, family, prompt, record, epoch):
        return True


class TakesEverythingFromA(HalfToTheWorst):
    def quotas(self, batch, configured, success):
        return {"a": 0, "b": sum(configured.values())}


class NotACurriculum:
    pass


def in_order(family: str, epoch: int, num_prompts: int) -> range:
    return range(num_prompts)


def test_without_a_pool_every_group_has_a_prompt_of_its_own():
    prompts = Prompts("a", None, in_order)
    assert [prompts.draw() for _ in range(5)] == [(index, 0) for index in range(5)]


def test_a_pool_is_played_in_a_new_order_every_epoch():
    prompts = Prompts("a", 20, lambda *of: prompt_order(7, *of))
    epochs = [[prompts.draw()[0] for _ in range(20)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(20))
    again = Prompts("a", 20, lambda *of: prompt_order(7, *of))
    assert [again.draw()[0] for _ in range(20)] == epochs[0], "by the run's seed"
    assert prompt_order(8, "a", 0, 20) != epochs[0] != prompt_order(7, "b", 0, 20)


def test_solved_and_hopeless_prompts_are_passed_over_and_come_back():
    prompts, curriculum = Prompts("a", 4, in_order), InformativePrompts(revisit_epochs=3)
    for _ in range(2):
        for prompt, success in enumerate((0.0, 0.5, 1.0, 0.25)):
            prompts.note(prompt, success)
    plays = lambda *of_prompt: curriculum.plays("a", *of_prompt)  # noqa: E731
    epochs: dict[int, list[int]] = {}
    num_skipped = 0
    for _ in range(12):
        prompt, skipped = prompts.draw(plays)
        epochs.setdefault(prompts.epoch, []).append(prompt)
        num_skipped += skipped
    assert epochs == {0: [0, 1, 2, 3], 1: [1, 3], 2: [1, 3], 3: [0, 1, 2, 3]}
    assert num_skipped == 4


def test_a_pool_without_anything_worth_playing_is_played_all_the_same():
    prompts = Prompts("a", 3, in_order)
    drawn = [prompts.draw(lambda *of_prompt: False) for _ in range(4)]
    assert drawn == [(0, 3), (1, 3), (2, 3), (0, 3)]


def test_success_is_a_running_mean_that_forgets():
    record = SuccessRecord()
    for success in (1.0, 0.0, 0.5):
        record = record.after(success)
    assert record == SuccessRecord(3, 0.5)
    for _ in range(100):
        record = record.after(1.0)
    assert 0.99 < record.success_rate < 1.0 and record.num_groups == 103


def play(driver: Driver, success: dict[int, float], version: int) -> None:
    """Play everything started: prompts succeed as often as given, out of four members."""
    while driver.starts:
        for start in driver.take_starts():
            if start.trajectory_id in driver.gate.seats:
                driver(done(start, float(start.member < 4 * success[start.prompt_index]), version))


def test_the_gate_plays_what_teaches_and_counts_what_it_leaves_out():
    families = {"a": family(4, size=4, num_prompts=4)}
    driver = Driver(families, max_staleness=0, curriculum="informative_prompts")
    played = []
    for version in range(4):
        played.append(sorted({start.prompt_index for start in driver.starts}))
        play(driver, {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.75}, version)
        driver(BatchRequested(version))
        driver(VersionLoaded(version + 1))
    assert played == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 3], [0, 1, 2, 3]], "two of each first; in epoch 4 everything"
    groups = [group.group_id for batch in driver.batches for group in batch.groups]
    assert sorted(groups) == [f"a-{index:06d}" for index in range(16)], "groups are numbered on, prompts return"
    assert sorted(group.seed_env for group in driver.batches[2].groups) == [1, 1, 3, 3]
    counters = driver.batches[2].counters
    assert (counters["left_out_prompts/a"], counters["prompt_epoch/a"]) == (2, 3)
    assert counters["success_so_far/a"] == pytest.approx((4 * 0.0 + 2 * 0.5 + 2 * 1.0 + 4 * 0.625 + 0.0) / 12, abs=0.2)
    assert sum(batch.counters.get("skipped_prompts/a", 0) for batch in driver.batches) == 4


def test_what_a_curriculum_learned_survives_a_resume():
    families = {"a": family(4, size=4, num_prompts=4)}
    config = dict(max_staleness=0, curriculum="informative_prompts")
    driver = Driver(families, **config)
    for version in range(2):
        play(driver, {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.75}, version)
        driver(BatchRequested(version))
        driver(VersionLoaded(version + 1))
    state = json.loads(json.dumps(driver.gate.snapshot()))
    resumed = Driver(families, state=state, **config)
    assert [s.prompt_index for s in resumed.starts] == [s.prompt_index for s in driver.starts]
    play(driver, {1: 0.5, 3: 0.75}, 2)
    play(resumed, {1: 0.5, 3: 0.75}, 2)
    for each in (driver, resumed):
        each(BatchRequested(2))
        each(VersionLoaded(3))
    assert [s.prompt_index for s in resumed.starts] == [s.prompt_index for s in driver.starts]


def test_shares_may_move_with_success_and_keep_the_batch():
    families = {"a": family(4, size=4), "b": family(4, size=4)}
    driver = Driver(families, max_staleness=1, curriculum=f"{HERE}:HalfToTheWorst")
    sizes = []
    for version in range(5):
        for start in driver.take_starts():
            driver(done(start, float(start.family == "a"), version))
        driver(BatchRequested(version))
        sizes.append([sum(g.family == name for g in driver.batches[-1].groups) for name in ("a", "b")])
        driver(VersionLoaded(version + 1))
    assert sizes == [[4, 4], [4, 4], [2, 6], [2, 6], [2, 6]], "batches that were worked on already keep their quotas"


def test_a_curriculum_cannot_starve_a_family_or_change_the_batch():
    config = RolloutConfig(curriculum=f"{HERE}:TakesEverythingFromA")
    gate = StalenessGate("run", {"a": family(2), "b": family(2)}, config)
    with pytest.raises(
        ValueError, match=r"gave \{'a': 0, 'b': 4\} for batch 1; it must name every family with at least 1"
    ):
        gate.handle(Opened())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("harder", {}, "rollout.curriculum is 'harder'; allowed are 'informative_prompts' and import paths"),
        ("nowhere:Class", {}, "which cannot be imported"),
        (f"{HERE}:Missing", {}, "which cannot be imported"),
        (f"{HERE}:NotACurriculum", {}, "has no method 'quotas'"),
        ("informative_prompts", {"solved": 1}, "do not suit 'informative_prompts'"),
        ("informative_prompts", {"solved_from": 0.1, "hopeless_to": 0.2}, "the first below the second"),
    ],
)
def test_curricula_that_cannot_be_used_are_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_curriculum(name, arguments)


def test_no_curriculum_is_none():
    assert make_curriculum(None, {}) is None


def test_a_start_names_the_prompt_and_the_group_apart():
    driver = Driver({"a": family(1, size=1, num_prompts=1)}, max_staleness=1)
    assert [(start.group_id, start.prompt_index) for start in driver.starts if isinstance(start, Start)] == [
        ("a-000000", 0),
        ("a-000001", 0),
    ]
