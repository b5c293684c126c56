"""The group queue with hand-written workers: batches, scores, lost workers, resume."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest

from resources.failures import DeadlineExceeded, FailureClass
from resources.rewards.base import Score
from resources.rollout.messages import WorkerReport
from tests.scripted_workers import (
    ManualClock,
    ScriptedWorker,
    _load,
    broken,
    families,
    make_queue,
    played,
    pool_families,
    run_with_worker,
    three_batches,
)


def test_batches_are_collected_and_repeatable():
    async def driver(queue):
        batches = await three_batches(queue)
        assert await queue.collect(2, 5.0) is batches[2], "a stage that is run again gets the same batch"
        with pytest.raises(ValueError, match="batch 0 was asked for, but the next one is batch 3"):
            await queue.collect(0, 5.0)
        return batches

    _, batches = run_with_worker(make_queue(), driver)
    assert [batch.groups[0].group_id for batch in batches] == [f"inline-{i:06d}" for i in range(3)]
    assert [member.reward for member in batches[0].groups[0].members] == [0.0, 1.0]
    assert batches[0].run_id == "run" and batches[0].counters["num_trajectories/inline"] == 2


def test_every_member_has_its_own_sampling_seed():
    """M21: seed 7, groups of 4: siblings share the environment's seed, sampling seeds are distinct and reproducible."""

    def play_once_failing(assignment):
        return broken(assignment) if assignment.attempt == 0 else played(assignment)

    runs = []
    for _ in range(2):
        worker, _ = run_with_worker(
            make_queue(families(group_size=4)), lambda queue: queue.collect(0, 5.0), play=play_once_failing
        )
        first = [a for a in worker.seen if a.group_id == "inline-000000"]
        assert len({a.seed_env for a in first}) == 1
        assert len(first) == 8 and len({a.seed_sampling for a in first}) == 8, "retries draw anew"
        runs.append({a.trajectory_id: (a.seed_env, a.seed_sampling) for a in first})
    assert runs[0] == runs[1]


def test_pool_scores_complete_groups_and_duplicates_are_ignored():
    """S26."""
    scores: list[Score] = []

    def play(assignment):
        scores.append(Score(assignment.trajectory_id, "exact_answer", "3", 1.0 - assignment.member, success=True))
        scores.append(Score(assignment.trajectory_id, "exact_answer", "3", 9.0))
        return played(assignment, awaits_score=True, scorer="exact_answer")

    async def driver(queue):
        batch = await queue.collect(0, 5.0)
        stats = await queue.stats()
        return batch, stats

    _, (batch, stats) = run_with_worker(make_queue(pool_families(), scores=scores), driver, play=play)
    members = batch.groups[0].members
    assert [(m.reward, m.scorer, m.scorer_version) for m in members] in (
        [(9.0, "exact_answer", "3")] * 2,
        [(1.0, "exact_answer", "3"), (0.0, "exact_answer", "3")],
    )
    assert stats["num_ignored"] >= 1


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_score_that_is_faster_than_the_report_of_its_trajectory_counts(split):
    """A warm replica answers within milliseconds, and a busy worker reports later: the score must not be lost, or its
    trajectory would wait for it until it is overdue."""
    queue = make_queue(pool_families(), scores=[])

    def play(assignment):
        if assignment.split != split:
            return None
        for reward in (1.0 - assignment.member, 9.0):  # and answered twice: the first counts
            queue._events.score(Score(assignment.trajectory_id, "exact_answer", "3", reward, success=True))
        return played(assignment, awaits_score=True, scorer="exact_answer")

    async def driver(queue):
        if split == "train":
            return (await queue.collect(0, 5.0)).groups
        return await queue.evaluate({"pool": 2}, seed=5, evaluate_timeout_s=5.0)

    worker, groups = run_with_worker(queue, driver, play=play)
    expected = [1.0, 0.0] if split == "train" else [1.0]
    assert [[member.reward for member in group.members] for group in groups][:1] == [expected]
    assert {a.attempt for a in worker.seen if a.split == split} == {0}
    assert not queue._events.scores._early, "a score is kept no longer than it is needed"


def test_a_score_that_never_comes_fails_the_member_as_reward():
    clock = ManualClock()

    async def main():
        queue = make_queue(pool_families(), scores=[], clock=clock)
        worker = ScriptedWorker(queue, play=lambda assignment: played(assignment, awaits_score=True))
        await worker.step()
        await worker.step()
        clock.now += 5.9
        queue.tick()
        await worker.step()
        assert {a.attempt for a in worker.seen} == {0}
        clock.now += 0.2
        queue.tick()
        await worker.step()
        assert {a.attempt for a in worker.seen} == {0, 1}
        stats = await queue.stats()
        assert stats["families"]["pool"]["counts"]["failed.reward"] == 4
        assert any("no score of run/pool-000000/0/0 came" in line for line in stats["log_records"])
        assert (await queue.stats())["log_records"] == []
        await queue.close()

    asyncio.run(main())


def test_a_silent_worker_is_lost_and_its_trajectories_played_elsewhere():
    """S6, and S26 when it comes back: told to stop, its results ignored."""
    clock = ManualClock()

    async def main():
        queue = make_queue(max_staleness=0, clock=clock, worker_timeout_s=5.0)
        silent = ScriptedWorker(queue, "silent", play=lambda assignment: None)
        await silent.step()
        assert len(silent.seen) == 2
        other = ScriptedWorker(queue, "other")
        clock.now += 4.0
        await other.step()
        assert not other.seen
        clock.now += 1.5
        queue.tick()
        await other.step()
        await other.step()
        assert [a.attempt for a in other.seen] == [1, 1]
        batch = await queue.collect(0, 1.0)
        assert [m.trajectory_id for m in batch.groups[0].members] == [a.trajectory_id for a in other.seen]
        report = WorkerReport("silent", 100, tuple(played(a, 5.0) for a in silent.seen[:1]))
        assert (await queue.exchange(report)).resync
        held = tuple(a.trajectory_id for a in silent.seen)
        orders = await queue.exchange(WorkerReport("silent", 100, held=held))
        assert set(orders.cancels) == {(trajectory_id, "preempted") for trajectory_id in held}
        counts = (await queue.stats())["families"]["inline"]["counts"]
        assert counts["failed.infrastructure"] == 2
        await queue.close()

    asyncio.run(main())


def test_orders_that_were_lost_on_the_wire_are_given_again():
    async def main():
        queue = make_queue(max_staleness=0)
        lost = await queue.exchange(WorkerReport("w", 100, held=()))
        assert len(lost.assignments) == 2
        await queue.exchange(WorkerReport("w", 100, held=(lost.assignments[0].trajectory_id,)))
        again = await queue.exchange(WorkerReport("w", 100), 1.0)
        assert [(a.member, a.attempt) for a in again.assignments] == [(1, 1)]
        await queue.close()

    asyncio.run(main())


def test_work_is_shared_by_free_capacity():
    async def main():
        queue = make_queue(families(groups_per_iteration=8, group_size=4), max_staleness=0)
        big, small = (
            ScriptedWorker(queue, "big", 30, lambda a: None),
            ScriptedWorker(queue, "small", 10, lambda a: None),
        )
        for worker in (big, small):  # register before there is anything to win
            queue._dispatcher.heard(worker.worker_id, worker.capacity, queue._clock())
        await big.step()
        assert len(big.seen) == 24, "its 30 of 40 free places"
        for _ in range(4):
            await small.step()
        assert len(small.seen) == 8
        await queue.close()

    asyncio.run(main())


def test_every_waiting_consumer_gets_the_batch():
    """S28: all wake at once, nobody loops, nothing is lost."""

    async def driver(queue):
        batches = await asyncio.gather(*(queue.collect(0, 5.0) for _ in range(20)))
        assert len({id(batch) for batch in batches}) == 1
        await queue.version_loaded(1)
        return await queue.collect(1, 5.0)

    _, batch = run_with_worker(make_queue(), driver)
    assert batch.groups[0].group_id == "inline-000001"


def test_every_waiting_worker_wakes_and_each_trajectory_goes_to_one():
    """S28 on the other side: 40 workers wait for orders when a load admits 16 groups. All are answered at once, each
    with its share, without asking round and round."""
    num_workers, num_groups, size = 40, 16, 4
    of = families(groups_per_iteration=num_groups, group_size=size)
    looks = 0

    async def main():
        nonlocal looks
        queue = make_queue(of, max_staleness=0)
        first = ScriptedWorker(queue, "first", capacity=num_groups * size)
        await first.step()
        await first.step()
        await queue.collect(0, 5.0)
        await queue.exchange(WorkerReport("first", 0))  # it takes nothing more
        waiting = [
            asyncio.create_task(queue.exchange(WorkerReport(f"w{number}", 4, held=()), 1.0))
            for number in range(num_workers)
        ]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        take = queue._dispatcher.take

        def counted(*arguments):
            nonlocal looks
            looks += 1
            return take(*arguments)

        queue._dispatcher.take = counted
        await queue.version_loaded(1)
        orders = await asyncio.wait_for(asyncio.gather(*waiting), 5.0)
        assert all(one.assignments for one in orders), "everybody gets a share"
        for number in range(num_workers):  # what the shares left over is there for whoever asks again
            orders.append(await queue.exchange(WorkerReport(f"w{number}", 4)))
        await queue.close()
        return [each.trajectory_id for one in orders for each in one.assignments]

    ids = asyncio.run(main())
    assert len(ids) == len(set(ids)) == num_groups * size
    assert looks <= 5 * num_workers


def test_resume_from_a_snapshot_trains_each_prompt_once():
    """S9, S10: nothing twice, nothing skipped; the next batch of a resumed run is the next version's."""

    async def before(queue):
        batch = await queue.collect(0, 5.0)
        await queue.version_loaded(1)
        await asyncio.sleep(0.02)
        return batch, json.loads(json.dumps(await queue.snapshot()))

    lazy = lambda a: played(a) if a.group_id < "inline-000002" else None  # noqa: E731
    _, (first, state) = run_with_worker(make_queue(), before, play=lazy)

    async def after(queue):
        return [await queue.collect(1, 5.0), await _load(queue, 2) or await queue.collect(2, 5.0)]

    worker, batches = run_with_worker(make_queue(state=state), after, play=played)
    trained = [group.group_id for batch in [first, *batches] for group in batch.groups]
    assert trained == ["inline-000000", "inline-000001", "inline-000002"]
    assert all(a.attempt == 1 for a in worker.seen if a.group_id == "inline-000002")


def test_only_small_references_travel():
    """S17, S21: whatever a trajectory's tokens, what the queue holds and sends of it stays below 1 KB."""

    async def main():
        queue = make_queue(families(groups_per_iteration=64, group_size=8), max_staleness=0)
        orders = await queue.exchange(WorkerReport("w", 512, held=()))
        assert len(orders.assignments) == 512
        assert len(pickle.dumps(orders)) / 512 < 1024
        done = tuple(played(a, num_tokens=120_000) for a in orders.assignments)
        assert len(pickle.dumps(WorkerReport("w", 512, done))) / 512 < 1024
        await queue.exchange(WorkerReport("w", 512, done))
        batch = await queue.collect(0, 1.0)
        assert len(pickle.dumps(batch)) / 512 < 1024
        await queue.close()

    asyncio.run(main())


def test_redundant_trajectories_are_stopped_at_once_and_counted_by_what_they_had_played():
    """Two groups of two wanted, three of three started; the slow member and the slow group lose."""
    lost = {"inline-000000/2", "inline-000001/0", "inline-000001/1", "inline-000001/2"}

    def play(assignment):
        slow = f"{assignment.group_id}/{assignment.member}" in lost
        return None if slow else played(assignment, float(assignment.member % 2))

    async def main():
        queue = make_queue(
            families(groups_per_iteration=2, redundant_groups=1, redundant_members=1),
            max_staleness=0, clock=ManualClock(),
        )  # fmt: skip
        worker = ScriptedWorker(queue, play=play)
        await worker.step()
        assert len(worker.seen) == 9
        orders = await worker.step()
        assert {key.removeprefix("run/").rsplit("/", 1)[0] for key, _ in orders.cancels} >= lost, "with the same reply"
        assert {reason for _, reason in orders.cancels} == {"cancelled_redundant"}
        stopped = [assignment for assignment in worker.seen if f"{assignment.group_id}/{assignment.member}" in lost]
        for assignment in stopped:
            facts = dict(failure=FailureClass.CANCELLED, ref=None, termination="cancelled_redundant", num_turns=4)
            worker._done.append(played(assignment, 0.25, **facts))
        await worker.step()
        batch = await queue.collect(0, 5.0)
        assert {group.group_id for group in batch.groups} == {"inline-000000", "inline-000002"}
        assert [len(group.members) for group in batch.groups] == [2, 2]
        counts = {key.removesuffix("/inline"): value for key, value in batch.counters.items()}
        assert counts["redundant_groups"] == 1
        assert counts["cancelled_redundant.length.4"] == 4 and counts["cancelled_redundant.tokens"] >= 4 * 9
        assert counts["cancelled_redundant.reward_milli"] >= 4 * 250
        await queue.close()

    asyncio.run(main())


def test_a_late_group_does_not_hold_the_batch_within_a_share_window():
    both = {
        name: families(groups_per_iteration=2)["inline"].model_copy(update={"environment": name})
        for name in ("fast", "slow")
    }

    async def main():
        queue = make_queue(both, max_staleness=1, share_window=2)
        worker = ScriptedWorker(
            queue, play=lambda a: None if a.group_id in ("slow-000001", "slow-000002", "slow-000003") else played(a)
        )
        for _ in range(3):
            await worker.step()
        batch = await queue.collect(0, 5.0)
        assert [group.group_id for group in batch.groups] == [
            "fast-000000",
            "fast-000001",
            "fast-000002",
            "slow-000000",
        ]
        with pytest.raises(DeadlineExceeded, match=r"slow lacks 3 of 3 groups"):
            await queue.collect(1, 0.02)
        await queue.close()

    asyncio.run(main())
