"""Evaluation in the group queue: a lane of its own, before training's assignments."""

from __future__ import annotations

import asyncio

import pytest

from resources.failures import DeadlineExceeded
from tests.scripted_workers import (
    ScriptedWorker,
    broken,
    families,
    make_queue,
    played,
    run_with_worker,
)


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
        assert queue._gate.admission.accepted("inline") == 0, "outside admission"
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
