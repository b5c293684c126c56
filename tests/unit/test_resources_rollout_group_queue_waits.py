"""How a wait for the group queue ends when nothing comes: what is missing, whose failure it is, what is waited out."""

from __future__ import annotations

import asyncio

import pytest

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.rewards.base import Score
from resources.rollout.lost_groups import GroupsFail, GroupsStale, SignalLost
from resources.rollout.messages import Assignment, TrajectoryDone, Wait, WorkerReport
from tests.scripted_workers import (
    ManualClock,
    ScriptedWorker,
    broken,
    families,
    make_queue,
    played,
    pool_families,
    run_with_worker,
)


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
