"""The rollout worker's loop between a real group queue and hand-written environments, engines, writers and scorers."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import dataclass
from typing import Literal

import pytest

from resources.environments.deadline import DeadlineEnvironment
from resources.environments.family import FamilyConfig
from resources.environments.threads import DaemonThreads
from resources.failures import FailureClass, InfrastructureFailure
from resources.rewards.base import Score
from resources.rollout.config import RolloutConfig
from resources.rollout.encoding_cache import EncodingCache
from resources.rollout.episode_services import EpisodeServices
from resources.rollout.group_queue import GroupQueue
from resources.rollout.handover import Handover, ScoreSubmitter
from resources.rollout.worker_loop import WorkerLoop
from resources.trajectories.trajectory import TrajectoryRef
from tests.unit.test_resources_rollout_env_manager import EchoEnvironment, LetterFormat, ScriptedGenerator


class WinningGenerator(ScriptedGenerator):
    async def generate(self, request, hardware_class):
        await asyncio.sleep(0)
        self.answers = [("win", "stop", 0)]
        return await super().generate(request, hardware_class)


class JudgedEnvironment(EchoEnvironment):
    def judgement(self):
        return {"answer": 42}


class MemoryWriter:
    def __init__(self, error: Exception | None = None):
        self.rows, self.error = [], error

    async def write(self, trajectory):
        if self.error:
            raise self.error
        self.rows.append(trajectory)
        return TrajectoryRef("memory", len(self.rows) - 1)

    async def close(self): ...


@dataclass
class NamedScorer:
    name: str = "environment"
    version: str = "1"
    runs: Literal["inline", "pool"] = "inline"
    error: str = ""
    reward: float = 0.25

    def score(self, request):
        if self.error:
            raise RuntimeError(self.error)
        return Score(request.trajectory_id, self.name, self.version, self.reward, True, {"x": self.reward})


class WordyScorer(NamedScorer):
    def score(self, request):
        return "well done"


class Room:
    """A queue, a worker loop and their surroundings."""

    def __init__(
        self, *, scorer=None, environment=EchoEnvironment, writer=None, generator=None, family=None, make=None, **config
    ):
        settings = {"groups_per_iteration": 1, "group_size": 2, **(family or {})}
        families = {"f": FamilyConfig(environment="echo", hardware_class="c", **settings)}
        self.config = RolloutConfig(
            **{
                "exchange_wait_s": 0.05,
                "worker_timeout_s": 5.0,
                "retry_backoff_s": 0.0,
                "score_window_s": 0.0,
                **config,
            }
        )
        self.submitted = []
        self.scores: list[Score] = []
        self.reports = []
        self.num_broken_calls = 0
        self.queue = GroupQueue("run", "", families, self.config, 0, reward_results=self.take_scores)
        self.writer = writer or MemoryWriter()
        self.generator = generator or WinningGenerator()
        submitter = ScoreSubmitter(self.submit, self.config.score_window_s)
        handover = Handover(families, {"f": scorer or NamedScorer()}, self.writer, submitter)
        self.threads = DaemonThreads(8)
        self.loop = WorkerLoop("w", self.queue, families, self.config, handover, call=self.call, threads=self.threads)
        self.services = EpisodeServices(
            chat=EncodingCache(LetterFormat()), proxy=self.generator,
            make_environment=make or (lambda name, family: environment()),
            context_length=200, on_first_sampled=self.loop.note_first_sampled, log=self.loop.log,
        )  # fmt: skip

    def submit(self, requests):
        self.submitted += requests
        self.scores += [Score(r.trajectory_id, r.scorer, r.scorer_version, 0.5) for r in requests]

    def take_scores(self):
        scores, self.scores = self.scores, []
        return scores

    async def call(self, actor, method, *arguments):
        self.reports.append(arguments[0])
        if self.num_broken_calls:
            self.num_broken_calls -= 1
            if self.num_broken_calls % 2:
                await getattr(actor, method)(*arguments)  # it arrived, but its answer was lost
            raise InfrastructureFailure("the wire is cut")
        return await getattr(actor, method)(*arguments)

    def run(self, driver, limit_s=10.0):
        async def main():
            running = asyncio.create_task(self.loop.run(self.services))
            try:
                return await asyncio.wait_for(driver(self), limit_s)
            finally:
                await self.queue.close()
                await asyncio.wait_for(running, 5)

        return asyncio.run(main())


async def first_batch(room: Room):
    return await room.queue.collect(0, 5.0)


async def first_failure(room: Room) -> tuple[dict[str, int], list[str]]:
    lines: list[str] = []
    while True:
        stats = await room.queue.stats()
        lines += stats["log_records"]
        counts = stats["families"]["f"]["counts"]
        if any(key.startswith("failed.") for key in counts):
            return counts, lines
        await asyncio.sleep(0.01)


def test_trajectories_are_played_sealed_and_collected():
    room = Room()
    batch = room.run(first_batch)
    (group,) = batch.groups
    assert [member.reward for member in group.members] == [1.0, 1.0]
    row = room.writer.rows[group.members[0].ref.row]
    assert (row.trajectory_id, row.reward, row.scorer) == (group.members[0].trajectory_id, 1.0, "environment")
    assert any(report.sampled for report in room.reports)


def test_an_inline_scorer_judges_before_the_row_is_written():
    room = Room(scorer=NamedScorer("mine", "2"))
    batch = room.run(first_batch)
    assert {(m.reward, m.scorer, m.scorer_version) for m in batch.groups[0].members} == {(0.25, "mine", "2")}
    assert room.writer.rows[0].reward_components == {"x": 0.25}


def test_a_pool_scorer_gets_the_judgement_once_the_row_is_sealed():
    room = Room(scorer=NamedScorer("exact", "3", "pool"), environment=JudgedEnvironment)
    batch = room.run(first_batch)
    assert {(m.reward, m.scorer, m.scorer_version) for m in batch.groups[0].members} == {(0.5, "exact", "3")}
    assert room.submitted[0].payload == {"num_invalid_actions": 0, "answer": 42}
    assert room.writer.rows[0].reward is None


@pytest.mark.parametrize(
    ("changes", "failure", "text"),
    [
        (dict(scorer=NamedScorer("mine", error="no model")), FailureClass.REWARD, "raised RuntimeError: no model"),
        (dict(scorer=NamedScorer("mine", reward=math.nan)), FailureClass.REWARD, "score() gave reward nan"),
        (dict(scorer=NamedScorer("mine", reward=1e300)), FailureClass.REWARD, "at most 1e+18 in size"),
        (dict(scorer=WordyScorer("mine")), FailureClass.REWARD, "score() returned str"),
        (dict(scorer=NamedScorer("exact", runs="pool")), FailureClass.REWARD, "gives no judgement to score"),
        (dict(writer=MemoryWriter(InfrastructureFailure("disk full"))), FailureClass.INFRASTRUCTURE, "disk full"),
        (dict(writer=MemoryWriter(KeyError("bug"))), FailureClass.INFRASTRUCTURE, "broke down on it"),
    ],
)  # fmt: skip
def test_what_goes_wrong_on_the_way_is_data(changes, failure, text):
    counts, lines = Room(**changes).run(first_failure)
    assert counts[f"failed.{failure}"] >= 1
    assert any(text in line for line in lines), lines


def test_nothing_is_lost_when_the_queue_cannot_be_reached():
    """S26: reported again, and heard once; orders that were lost on the way are given again."""

    async def driver(room):
        batches = []
        for version in range(2):
            room.num_broken_calls = 4
            batches.append(await room.queue.collect(version, 8.0))
            await room.queue.version_loaded(version + 1)
        return batches

    room = Room(stale_policy="finish_masked")
    batches = room.run(driver)
    ids = [member.trajectory_id for batch in batches for member in batch.groups[0].members]
    assert len(ids) == len(set(ids)) == 4
    assert any(report.held for report in room.reports)


def test_cancelled_trajectories_tell_what_they_had():
    """Redundant members are stopped at once and counted with their length and reward so far."""

    class OneNeverAnswers(WinningGenerator):
        async def generate(self, request, hardware_class):
            if "/2/" in request.trajectory_id and len(request.token_ids) > 3:
                await asyncio.sleep(3600)
            await asyncio.sleep(0.0 if "/2/" in request.trajectory_id else 0.05)
            self.answers = [("bad" if "/2/" in request.trajectory_id else "win", "stop", 0)]
            return await ScriptedGenerator.generate(self, request, hardware_class)

    async def driver(room):
        await first_batch(room)
        while True:
            counts = (await room.queue.stats())["families"]["f"]["counts"]
            if counts.get("cancelled_redundant.trajectories"):
                return counts
            await asyncio.sleep(0.01)

    room = Room(generator=OneNeverAnswers(), pipeline="synchronous", max_staleness=0)
    families = {
        "f": FamilyConfig(
            environment="echo", hardware_class="c", groups_per_iteration=1, group_size=2, redundant_members=1
        )
    }
    room.queue = GroupQueue("run", "", families, room.config, 0, reward_results=list)
    room.loop._queue = room.queue
    counts = room.run(driver)
    assert counts["cancelled_redundant.trajectories"] == 1
    assert counts["cancelled_redundant.turns"] == 1 and counts["cancelled_redundant.reward_milli"] == -100
    assert [row.termination for row in room.writer.rows].count("cancelled_redundant") == 1


class HangsOnce(EchoEnvironment):
    """The first one made never answers a step; what follows it does, or not."""

    num_made = 0
    hang: tuple[int, ...] = (0,)

    def __init__(self):
        super().__init__()
        self.number = type(self).num_made
        type(self).num_made += 1

    async def step(self, action):
        if self.number in self.hang:
            await asyncio.Event().wait()
        return await super().step(action)


@pytest.mark.parametrize(
    ("policy", "hangs", "expected"),
    [
        ("retry", 1, [8]),  # played again, and well
        ("minimum_group", 1, [8]),
        ("minimum_group", 3, [7]),  # the retries are used up: a short group
        ("retry", 3, [8]),  # ... or the whole group once more
        ("fail_fast", 1, [8]),
    ],
)
def test_one_of_eight_members_never_returns(policy, hangs, expected):
    """S3: the batch comes, by the configured policy, and the log names the member that did not."""

    class Stubborn(HangsOnce):
        num_made = 0
        hang = tuple([0, *range(8, 7 + hangs)])  # the first, and its retries, which come after the other seven

    def make(name, family):
        return DeadlineEnvironment(
            Stubborn(), family=name, reset_deadline_s=5.0, step_deadline_s=0.02, threads=DaemonThreads(1)
        )

    async def driver(room):
        batch = await room.queue.collect(0, 8.0)
        return batch, await room.queue.stats()

    room = Room(make=make, family={"group_size": 8}, member_failure=policy, pipeline="synchronous", max_staleness=0)
    batch, stats = room.run(driver)
    assert [len(group.members) for group in batch.groups] == expected
    counts = stats["families"]["f"]["counts"]
    assert counts["failed.environment"] == hangs
    assert counts.get("short_groups", 0) == (expected == [7])
    assert (
        counts.get("failed_groups", 0)
        == counts.get("reissued_groups", 0)
        == (policy == "fail_fast" or (policy == "retry" and hangs == 3))
    )
    named = [line for line in stats["log_records"] if "step did not return within 0.02 s" in line]
    assert len(named) == hangs and all("run/f-000000/0/" in line for line in named)


def test_thousands_of_trajectories_live_in_one_worker():
    """A trajectory is a coroutine: no thread, no process of its own, however long its environment takes."""
    number = 2000
    all_there, inside, most_threads = asyncio.Event(), 0, 0

    class SlowEnvironment(EchoEnvironment):
        async def reset(self, seed):
            nonlocal inside, most_threads
            inside += 1
            most_threads = max(most_threads, threading.active_count())
            if inside == number:
                all_there.set()
            await all_there.wait()
            return await super().reset(seed)

    room = Room(
        environment=SlowEnvironment,
        family={"groups_per_iteration": number // 8, "group_size": 8, "max_concurrent_groups": number // 8},
        max_concurrent_trajectories=number,
        pipeline="synchronous",
        max_staleness=0,
    )
    before = threading.active_count()
    batch = room.run(lambda room: room.queue.collect(0, 60.0), limit_s=60.0)
    assert sum(len(group.members) for group in batch.groups) == number == len(room.writer.rows)
    assert most_threads <= before + 2


class NeverAnsweringGenerator(ScriptedGenerator):
    async def generate(self, request, hardware_class):
        await asyncio.Event().wait()


def test_a_worn_out_worker_hands_back_what_it_plays_and_takes_nothing_more():
    """Abandoned calls hold threads for ever: the process is to be replaced, and nothing of it is lost."""
    gate = threading.Event()

    async def driver(room):
        while len(room.loop._tasks) < 4:
            await asyncio.sleep(0.01)
        assert room.loop.worn_out == ""
        for _ in range(3):
            call = room.threads.submit(gate.wait)
            room.threads.abandon(call)
        while not room.loop.worn_out:
            await asyncio.sleep(0.01)
        stats = await room.queue.stats()
        return room.loop.worn_out, room.loop.stats(), stats

    room = Room(generator=NeverAnsweringGenerator(), max_abandoned_calls=2, breaker_failures=1)
    worn_out, stats, of_queue = room.run(driver)
    gate.set()
    assert worn_out == (
        "3 environment calls were abandoned and hold a thread each, more than rollout.max_abandoned_calls (2)"
    )
    assert (stats["running"], stats["abandoned_calls"], stats["abandoned_calls_total"]) == (0, 3, 3)
    counts = of_queue["families"]["f"]["counts"]
    assert counts["failed.infrastructure"] == counts["retried"] == 4, "they are played again"
    assert {(row.termination, row.failure_class) for row in room.writer.rows} == {
        ("preempted", FailureClass.INFRASTRUCTURE)
    }
    assert "handed back by rollout worker w: 3 environment calls" in room.writer.rows[0].failure_message
    assert of_queue["workers"]["w"] == {"held": 0, "capacity": 0, "silent_s": of_queue["workers"]["w"]["silent_s"]}
    assert of_queue["num_queued"] == 4, "for somebody else"
    assert of_queue["breakers"]["f"]["num_failures"] == 0, "the family has done nothing"
    assert any("hands back 4 trajectories" in line for line in of_queue["log_records"])


def test_calls_that_come_back_are_no_longer_abandoned():
    gate, threads = threading.Event(), DaemonThreads(1)
    call = threads.submit(gate.wait)
    threads.abandon(call)
    assert threads.num_abandoned == 1
    gate.set()
    call.result(10)
    threads.submit(int).result(10)  # the thread has booked the one before
    assert (threads.num_abandoned, threads.num_ever_abandoned) == (0, 1)


def test_a_queue_that_is_gone_ends_the_loop():
    """On a standing cluster a driver's sudden end leaves its rollout workers behind."""
    room = Room(queue_gone_limit_s=30.0)
    now = [0.0]
    room.loop._clock = lambda: now[0]

    async def call(actor, method, *arguments):
        now[0] += 16.0
        raise InfrastructureFailure("actor control is gone: it was released")

    room.loop._call = call
    with pytest.raises(InfrastructureFailure, match=r"worker w: the group queue could not be reached for 30 s"):
        asyncio.run(asyncio.wait_for(room.loop.run(room.services), 10))
    assert now[0] == 32.0
