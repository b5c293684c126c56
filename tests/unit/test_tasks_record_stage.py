"""What an iteration's record asks of the rollout workers."""

from __future__ import annotations

from typing import Any

from resources.failures import InfrastructureFailure
from tasks.record.stage import worker_stats


class CountingWorker:
    async def stats(self) -> dict[str, Any]:
        return {"running": 3}


class LostWorker:
    async def stats(self) -> dict[str, Any]:
        raise InfrastructureFailure("actor rollout-1 was lost during stats(): its worker is gone")


def test_a_lost_worker_does_not_end_the_iteration() -> None:
    said: list[str] = []
    assert worker_stats([CountingWorker(), LostWorker(), CountingWorker()], said.append) == [{"running": 3}] * 2
    assert said == ["no figures of a rollout worker: actor rollout-1 was lost during stats(): its worker is gone"]
