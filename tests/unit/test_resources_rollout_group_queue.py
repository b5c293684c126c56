"""The group queue with hand-written workers: batches, evaluation, losses, deadlines, resume."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle

import pytest

from resources.environments.family import FamilyConfig
from resources.failures import DeadlineExceeded, FailureClass, InfrastructureFailure
from resources.rewards.base import Score
from resources.rollout.config import RolloutConfig
from resources.rollout.group_queue import GroupQueue
from resources.rollout.lost_groups import GroupsFail, GroupsStale, SignalLost
from resources.rollout.messages import Assignment, Reserved, TrajectoryDone, Wait, WorkerReport
from resources.trajectories.trajectory import TrajectoryRef


class ManualClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def families(**changes) -> dict[str, FamilyConfig]:
    common = dict(environment="e", hardware_class="compute", groups_per_iteration=1, group_size=2)
    return {"inline": FamilyConfig(**{**common, **changes})}


def pool_families() -> dict[str, FamilyConfig]:
    return {"pool": families(scorer="exact_answer", score_deadline_s=5.0)["inline"]}


def make_queue(of=None, *, scores=None, clock=None, state=None, seed=7, **config) -> GroupQueue:
    config = {"reward_poll_s": 0.005, "score_grace_s": 1.0, "retry_backoff_s": 0.0, **config}
    if config.get("max_staleness") == 0:
        config["pipeline"] = "synchronous"
    reader = None if scores is None else (lambda: [scores.pop() for _ in range(len(scores))])
    extra = {} if clock is None else {"clock": clock}
    return GroupQueue(
        "run", "file:///nowhere", of or families(), RolloutConfig(**config), seed, state, reward_results=reader, **extra
    )


def played(assignment: Assignment, reward: float | None = None, **changes) -> TrajectoryDone:
    reward = float(assignment.member) if reward is None else reward
    awaits = changes.pop("awaits_score", False)
    fields = dict(
        trajectory_id=assignment.trajectory_id, family=assignment.family, group_id=assignment.group_id,
        member=assignment.member, attempt=assignment.attempt, ref=TrajectoryRef("trajectories/w-000001.arrow", 3),
        reward=None if awaits else reward, awaits_score=awaits, success=reward > 0, failure=None, failure_message="",
        termination="terminated", oldest_version=0, newest_version=0, num_sampled_tokens=5, num_tokens=9, num_turns=2,
        num_invalid_actions=0, truncated=False, duration_s=0.1,
    )  # fmt: skip
    return TrajectoryDone(**{**fields, **changes})


def broken(assignment: Assignment) -> TrajectoryDone:
    return played(
        assignment, awaits_score=True, ref=None, failure=FailureClass.ENVIRONMENT, failure_message="lake is dry"
    )


class ScriptedWorker:
    """Plays what it is given at once, as ``play`` says; a play of None never ends."""

    def __init__(self, queue: GroupQueue, worker_id: str = "w0", capacity: int = 100, play=played):
        self.queue, self.worker_id, self.capacity, self.play = queue, worker_id, capacity, play
        self.seen: list[Assignment] = []
        self.cancelled: list[tuple[str, str]] = []
        self._done: list[TrajectoryDone] = []
        self._first = True

    async def step(self, wait_s: float = 0.0):
        done, self._done = tuple(self._done), []
        held, self._first = (() if self._first else None), False
        await asyncio.sleep(0)
        orders = await self.queue.exchange(WorkerReport(self.worker_id, self.capacity, done, held=held), wait_s)
        self.seen += orders.assignments
        self.cancelled += orders.cancels
        self._first = orders.resync
        for assignment in orders.assignments:
            result = self.play(assignment)
            if result is not None:
                self._done.append(dataclasses.replace(result, **self.versions(result)))
        return orders

    def versions(self, result: TrajectoryDone) -> dict[str, int]:
        version = self.queue._gate.version
        return {"oldest_version": version, "newest_version": version}

    async def run(self):
        while not (await self.step(wait_s=0.05)).closing:
            pass


def run_with_worker(queue: GroupQueue, driver, **worker):
    """Run a driver coroutine beside a scripted worker; returns the worker and what the driver returned."""

    async def main():
        player = ScriptedWorker(queue, **worker)
        playing = asyncio.create_task(player.run())
        try:
            return player, await driver(queue)
        finally:
            await queue.close()
            await asyncio.wait_for(playing, 5)

    return asyncio.run(main())


async def three_batches(queue: GroupQueue):
    batches = []
    for version in range(3):
        batches.append(await queue.collect(version, 5.0))
        await queue.version_loaded(version + 1)
    return batches


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


def test_a_wait_says_what_is_missing():
    """S3: the waiting id, its worker and its stage are named."""

    async def main():
        clock = ManualClock()
        queue = make_queue(pool_families(), scores=[], clock=clock)
        worker = ScriptedWorker(queue, play=lambda a: played(a, awaits_score=True) if a.member else None)
        await worker.step()
        await worker.step()
        clock.now += 3.0
        waiting = (Wait("run/pool-000000/0/0", "step 2 of environment 'e'", 12.0),)
        await queue.exchange(WorkerReport("w0", 100, waiting=waiting))
        with pytest.raises(DeadlineExceeded) as error:
            await queue.collect(0, 0.0)
        for text in (
            "batch 0 is not complete", "pool lacks 1 of 1 groups", "pool-000000:",
            "run/pool-000000/0/0 waits for step 2 of environment 'e', on w0, since 12 s",
            "run/pool-000000/1/0 waits for its score from scorer 'exact_answer' since 3 s",
        ):  # fmt: skip
            assert text in str(error.value)
        await queue.close()

    asyncio.run(main())


def test_without_workers_the_wait_says_so():
    async def main():
        queue = make_queue()
        with pytest.raises(DeadlineExceeded, match="no rollout worker has reported"):
            await queue.collect(0, 0.02)
        await queue.close()
        with pytest.raises(InfrastructureFailure, match="was closed"):
            await queue.collect(0, 5.0)

    asyncio.run(main())


def test_a_stall_is_logged_then_ends_the_wait():
    async def main():
        queue = make_queue(stall_after_s=0.02, stall_limit_s=0.1)
        worker = ScriptedWorker(queue, play=lambda assignment: None)
        await worker.step()
        with pytest.raises(DeadlineExceeded, match="nothing was scored for .* run/inline-000000/0/0 running on w0"):
            await queue.collect(0, 60.0)
        assert sum("nothing was scored" in line for line in (await queue.stats())["log_records"]) == 1
        await queue.close()

    asyncio.run(main())


def test_failures_in_a_row_pause_a_family_and_do_not_end_the_run():
    """An outage of environments waits: retries back off, and after breaker_failures new starts wait as well."""
    clock = ManualClock()

    async def main():
        queue = make_queue(
            families(group_size=4), clock=clock, retry_backoff_s=1.0, breaker_failures=4, max_reissues=0,
            max_member_retries=0, max_staleness=0,
        )  # fmt: skip
        worker = ScriptedWorker(queue, play=broken)
        for _ in range(4):
            await worker.step()
        started = len(worker.seen)
        assert started <= 12, "the third group at the latest waits out the pause"
        for _ in range(10):
            await worker.step()
        assert len(worker.seen) == started
        worker.play = played
        for _ in range(6):
            clock.now += 11.0
            queue._dispatcher.heard("w0", 100, clock.now)
            queue.tick()
            await worker.step()
        batch = await queue.collect(0, 1.0)
        assert len(batch.groups[0].members) == 4
        await queue.close()

    asyncio.run(main())


def test_one_familys_outage_leaves_the_others_alone():
    """The breaker is the family's: beside it another one starts, is retried and is scored as ever."""
    clock = ManualClock()
    of = {"sick": families()["inline"], "well": families(groups_per_iteration=4)["inline"]}

    async def main():
        queue = make_queue(
            of, clock=clock, retry_backoff_s=1.0, breaker_failures=2, max_member_retries=0, max_reissues=0,
            max_staleness=0,
        )  # fmt: skip
        worker = ScriptedWorker(queue, play=lambda a: broken(a) if a.family == "sick" else played(a))
        for _ in range(6):
            await worker.step()
        stats = await queue.stats()
        assert stats["breakers"]["sick"]["state"] == "open"
        assert stats["breakers"]["well"] == {
            "state": "closed", "failures_in_a_row": 0, "num_failures": 0, "num_openings": 0, "last_failure": "",
        }  # fmt: skip
        assert stats["families"]["well"]["complete"] == 4 and stats["families"]["sick"]["complete"] == 0
        with pytest.raises(DeadlineExceeded, match="sick lacks 1 of 1 groups"):
            await queue.collect(0, 0.0)
        await queue.close()

    asyncio.run(main())


def test_evaluation_is_played_first_and_apart_from_training():
    async def main():
        queue = make_queue(families(group_size=4), max_staleness=0)
        worker = ScriptedWorker(queue, capacity=3)
        evaluation = asyncio.create_task(queue.evaluate({"inline": 3}, seed=5, evaluate_timeout_s=5.0, greedy=True))
        await asyncio.sleep(0)
        await worker.step()
        assert [(a.split, a.greedy) for a in worker.seen] == [("eval", True)] * 3
        await worker.step()
        groups = await evaluation
        assert [len(group.members) for group in groups] == [1, 1, 1]
        assert len({group.seed_env for group in groups}) == 3
        assert queue._gate.accepted("inline") == 0, "outside admission"
        assert {a.split for a in worker.seen[3:]} == {"train"}
        await queue.close()
        return worker.seen[:3]

    first, second = asyncio.run(main()), asyncio.run(main())
    seeds = lambda of: [(a.seed_env, a.seed_sampling) for a in of]  # noqa: E731
    assert seeds(first) == seeds(second), "the same episodes, whichever service plays them"
    assert {a.trajectory_id for a in first}.isdisjoint(a.trajectory_id for a in second)


def test_failed_evaluation_episodes_are_retried_then_left_unscored():
    def play(assignment):
        if assignment.split == "train":
            return None
        return (
            broken(assignment) if assignment.group_id.endswith("0") or assignment.attempt == 0 else played(assignment)
        )

    async def driver(queue):
        return await queue.evaluate({"inline": 2}, seed=5, evaluate_timeout_s=5.0)

    worker, groups = run_with_worker(make_queue(), driver, play=play)
    assert [len(group.members) for group in groups] == [0, 1]
    attempts = [a.attempt for a in worker.seen if a.split == "eval" and a.group_id.endswith("0")]
    assert attempts == [0, 1, 2]


def test_evaluation_names_what_is_missing_and_lets_go_of_it():
    async def main():
        queue = make_queue()
        worker = ScriptedWorker(queue, play=lambda assignment: None)
        with pytest.raises(ValueError, match=r"names the families \['lake'\]"):
            await queue.evaluate({"lake": 1}, 0, 1.0)
        evaluation = asyncio.create_task(queue.evaluate({"inline": 1}, seed=5, evaluate_timeout_s=0.05))
        await asyncio.sleep(0)
        await worker.step()
        with pytest.raises(DeadlineExceeded, match="1 of 1 episodes are missing: run/eval-.* running on w0"):
            await evaluation
        await worker.step()
        assert [termination for _, termination in worker.cancelled] == ["preempted"]
        await queue.close()

    asyncio.run(main())


def test_dynamic_sampling_ends_with_the_cause():
    """S5."""

    async def driver(queue):
        with pytest.raises(SignalLost, match="family 'inline': 4 groups had equal rewards"):
            await queue.collect(0, 10.0)

    run_with_worker(
        make_queue(dynamic_sampling=True, max_replaced_groups=3),
        driver,
        play=lambda assignment: played(assignment, 1.0),
    )


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


async def _load(queue: GroupQueue, version: int) -> None:
    await queue.version_loaded(version)


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


def test_a_wait_ends_with_the_reason_when_a_supervisor_says_that_nothing_can_come():
    async def scenario() -> None:
        queue = make_queue()
        waiting = asyncio.create_task(queue.collect(0, 60.0))
        await asyncio.sleep(0)
        await queue.fail("every rollout worker was lost")
        with pytest.raises(InfrastructureFailure, match="every rollout worker was lost"):
            await asyncio.wait_for(waiting, 10.0)
        await queue.close()

    asyncio.run(scenario())


def test_what_always_fails_is_a_stall_that_names_the_failure():
    """Failures are no progress: the wait ends after stall_limit_s, not only when its own time is over."""
    clock = ManualClock()

    async def main():
        queue = make_queue(clock=clock, stall_after_s=5.0, stall_limit_s=20.0, breaker_failures=1000)
        worker = ScriptedWorker(queue, play=broken)
        waiting = asyncio.create_task(queue.collect(0, 900.0))
        for _ in range(30):
            clock.now += 1.0
            await worker.step()
            queue.tick()
            await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match="nothing was scored for .* s: .* the last one: lake is dry"):
            await asyncio.wait_for(waiting, 5)
        assert any("failed (environment): lake is dry" in line for line in await queue.take_log())
        assert await queue.take_log() == []
        await queue.close()

    asyncio.run(main())


def test_a_verdict_with_a_message_is_not_called_unscored():
    """The unit tests' scorer says why the tests failed; the trajectory is scored 0 all the same."""
    scores: list[Score] = []

    def play(assignment: Assignment) -> TrajectoryDone:
        message = "expected 3, got 4"
        scores.append(
            Score(assignment.trajectory_id, "unit_tests", "1", float(assignment.member), failure_message=message)
        )
        return played(assignment, awaits_score=True)

    async def driver(queue):
        batch = await queue.collect(0, 5.0)
        return batch, await queue.take_log()

    _, (batch, lines) = run_with_worker(make_queue(pool_families(), scores=scores), driver, play=play)
    assert [member.reward for member in batch.groups[0].members] == [0.0, 1.0]
    assert not [line for line in lines if "expected 3" in line]


def test_what_blocks_a_workers_event_loop_fails_by_its_name():
    """The worker's own reports wait for the loop: its monitor tells who blocks, and the loss is told with that."""
    clock = ManualClock()
    message = (
        "the event loop has been blocked for 2.1 s by run/inline-000000/0/0 in step of the environment of 'inline'"
    )

    async def main():
        queue = make_queue(clock=clock, max_staleness=0)
        stuck = ScriptedWorker(queue, play=lambda assignment: None)
        await stuck.step()
        culprit, other = stuck.seen
        await queue.worker_blocked("w0", culprit.trajectory_id, message)
        counts = (await queue.stats())["families"]["inline"]["counts"]
        assert counts["failed.environment"] == 1 and "failed.infrastructure" not in counts
        assert queue._dispatcher.breaker("inline").last_failure == message
        clock.now += 6.0
        queue.tick()
        lines = await queue.take_log()
        counts = (await queue.stats())["families"]["inline"]["counts"]
        assert counts["failed.infrastructure"] == 1, "the other one is the victim"
        assert any(line.startswith(f"rollout worker w0 is lost ({message})") for line in lines)

        # It comes back: what was taken from it is stopped, and what it says of it is not heard.
        late = ScriptedWorker(queue, worker_id="w0")
        late._done = [played(culprit), played(other)]
        ignored = queue._gate.num_ignored
        await late.step()
        assert queue._gate.num_ignored == ignored + 2
        await queue.worker_blocked("unknown", "nobody", "late news")
        await queue.close()

    asyncio.run(main())


def test_a_half_open_breaker_lets_one_trajectory_through():
    clock = ManualClock()

    async def main():
        queue = make_queue(
            families(group_size=4), clock=clock, retry_backoff_s=1.0, breaker_failures=4, max_staleness=0,
            worker_timeout_s=1000.0,
        )  # fmt: skip
        worker = ScriptedWorker(queue, play=broken)
        await worker.step()
        await worker.step()
        stats = await queue.stats()
        assert stats["breakers"]["inline"] == {
            "state": "open", "failures_in_a_row": 4, "num_failures": 4, "num_openings": 1,
            "last_failure": "lake is dry",
        }  # fmt: skip
        started = len(worker.seen)
        await worker.step()
        assert len(worker.seen) == started == 4
        clock.now += 30.0
        queue.tick()
        await worker.step()
        assert len(worker.seen) == started + 1, "the probe"
        clock.now += 30.0
        queue.tick()
        await worker.step()
        assert len(worker.seen) == started + 1, "its failure opens the breaker again"
        with pytest.raises(DeadlineExceeded) as error:
            await queue.collect(0, 0.0)
        assert "held back by the circuit breaker" in str(error.value)
        assert "environment of family 'inline' failed 5 times in a row: lake is dry" in str(error.value)
        clock.now += 30.0
        queue.tick()
        worker.play = played
        for _ in range(4):
            await worker.step()
        batch = await queue.collect(0, 1.0)
        assert len(batch.groups[0].members) == 4
        assert (await queue.stats())["breakers"]["inline"]["state"] == "closed"
        await queue.close()

    asyncio.run(main())


def test_what_never_worked_is_not_waited_out():
    """An outage waits for its end; a family that never worked is a mistake and says so after never_worked_limit_s."""
    clock = ManualClock()

    async def main():
        queue = make_queue(clock=clock, breaker_failures=4, never_worked_limit_s=30.0, worker_timeout_s=1000.0)
        worker = ScriptedWorker(queue, play=broken)
        waiting = asyncio.create_task(queue.collect(0, 900.0))
        for _ in range(40):
            clock.now += 1.0
            await worker.step()
            queue.tick()
            await asyncio.sleep(0)
        with pytest.raises(
            DeadlineExceeded,
            match=r"no trajectory of family 'inline' has ended well since the start, for 3\d s "
            r"\(rollout.never_worked_limit_s\); environment of family 'inline' failed \d+ times in a row: lake is dry",
        ):
            await asyncio.wait_for(waiting, 5)
        await queue.close()

    asyncio.run(main())


def test_a_family_that_has_worked_is_waited_for():
    clock = ManualClock()

    async def main():
        queue = make_queue(clock=clock, breaker_failures=4, never_worked_limit_s=30.0, worker_timeout_s=1000.0)
        worker = ScriptedWorker(queue)
        for _ in range(3):
            await worker.step()
        await queue.collect(0, 5.0)
        worker.play = broken
        await queue.version_loaded(1)
        waiting = asyncio.create_task(queue.collect(2 if queue._gate.next_batch == 2 else 1, 900.0))
        for _ in range(60):
            clock.now += 1.0
            await worker.step()
            queue.tick()
            await asyncio.sleep(0)
        worker.play = played
        for _ in range(30):
            clock.now += 1.0
            await worker.step()
            queue.tick()
            await asyncio.sleep(0)
        await asyncio.wait_for(waiting, 5)
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


@pytest.mark.parametrize(
    ("limit", "error", "message"),
    [
        (2, GroupsFail, r"family 'inline': 3 groups could not get enough scored members, .*last failure: lake is dry"),
        (None, DeadlineExceeded, "nothing was scored for"),
    ],
)
def test_failed_groups_end_the_wait_with_their_own_cause_or_wait_an_outage_out(limit, error, message):
    async def driver(queue):
        with pytest.raises(error, match=message):
            await queue.collect(0, 30.0)

    queue = make_queue(
        max_staleness=0, max_member_retries=0, max_reissues=9, max_failed_groups=limit, stall_after_s=0.2,
        stall_limit_s=0.4,
    )  # fmt: skip
    run_with_worker(queue, driver, play=broken)


def test_stale_groups_end_the_wait_with_their_own_cause():
    async def main():
        queue = make_queue(families(group_size=1), max_staleness=1, max_stale_groups=1)
        worker = ScriptedWorker(queue, play=lambda assignment: None)
        await worker.step()
        for number, assignment in enumerate(worker.seen):
            report = WorkerReport("w0", 100, sampled=((assignment.trajectory_id, 0),))
            await queue.exchange(report)
            assert number < 2
        await queue.version_loaded(1)
        await queue.version_loaded(2)
        with pytest.raises(GroupsStale, match=r"2 groups were beyond the staleness bound .*max_stale_groups \(1\)"):
            await queue.collect(2, 5.0)
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


def test_groups_of_a_batch_are_known_before_it_is_complete():
    """What is reserved for a streamed update is in the batch; nothing is taken by looking."""
    slow: dict[str, Assignment] = {}

    def play(assignment):
        if assignment.group_id not in ("inline-000000", "inline-000002"):
            slow[assignment.trajectory_id] = assignment
            return None
        return played(assignment)

    async def main():
        queue = make_queue(families(groups_per_iteration=3), max_staleness=1)
        worker = ScriptedWorker(queue, play=play)
        for _ in range(3):
            await worker.step()
        collecting = asyncio.create_task(queue.collect(0, 5.0))
        await asyncio.sleep(0)
        early = await queue.reserved(0, [], 5.0)
        names = [group.group_id for group in early.groups]
        assert names == ["inline-000000", "inline-000002"] and not early.is_all
        again = await queue.reserved(0, names, 0.0)
        assert again == Reserved((), False), "what is known is not told again"
        waiting = asyncio.create_task(queue.reserved(0, names, 30.0))
        await asyncio.sleep(0)
        worker._done += [played(assignment, oldest_version=0) for assignment in slow.values()]
        await worker.step()
        batch, last = await collecting, await waiting
        assert last.is_all or {group.group_id for group in last.groups} <= {group.group_id for group in batch.groups}
        assert set(early.groups) <= set(batch.groups) and len(batch.groups) == 3
        rest = await queue.reserved(0, names, 0.0)
        assert rest.is_all and {*rest.groups, *early.groups} == set(batch.groups)
        assert queue._gate.families["inline"].complete, "groups of the next batch are there"
        assert await queue.reserved(1, [], 0.0) == Reserved((), False), "nobody asked for it: they may still be evicted"
        await queue.close()

    asyncio.run(main())


def test_who_waits_for_further_groups_hears_at_once_that_the_batch_is_taken_or_will_never_come():
    async def main():
        queue = make_queue(families(groups_per_iteration=2))
        waiting = asyncio.create_task(queue.reserved(0, [], 30.0))
        await asyncio.sleep(0)
        await queue.fail("all rollout workers are gone")
        with pytest.raises(InfrastructureFailure, match="all rollout workers are gone"):
            await asyncio.wait_for(waiting, 5.0)
        await queue.close()

    asyncio.run(main())
