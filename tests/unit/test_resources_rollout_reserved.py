"""What a streamed update hears of a batch before it is complete."""

from __future__ import annotations

import asyncio

import pytest

from resources.failures import InfrastructureFailure
from resources.rollout.messages import Assignment, Reserved
from tests.scripted_workers import (
    ScriptedWorker,
    families,
    make_queue,
    played,
)


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
