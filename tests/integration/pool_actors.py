"""Actors and tasks that the pool tests run in workers."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from distributed import get_worker

from resources.pools.actors import ActorHandle, call, call_sync


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    async def add(self, value: int) -> int:
        self.value += value
        return self.value

    def add_in_thread(self, value: int) -> int:
        self.value += value
        return self.value

    async def pid(self) -> int:
        return os.getpid()

    async def fail(self) -> None:
        raise TimeoutError("the method's own")

    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"


class Caller:
    """Calls another actor from its worker's loop, and from a thread and loop of its own."""

    def __init__(self, target: ActorHandle) -> None:
        self.target = target

    async def relay(self, value: int) -> int:
        return await call(self.target, "add", value)

    def relay_from_own_loop(self, value: int) -> int:
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(asyncio.run(call(self.target, "add", value))))
        thread.start()
        thread.join(10)
        return answers[0]


class BrokenConstructor:
    def __init__(self) -> None:
        raise ValueError("no such model directory")


class HangingConstructor:
    def __init__(self) -> None:
        threading.Event().wait(3)


def add_from_task(target: ActorHandle, value: int) -> int:
    return call_sync(target, "add", value, timeout_s=10)


def worker_name() -> str:
    return str(get_worker().name)


def run_of(run_id: str) -> str:
    """What a stage sees of a run: the queue's name."""
    from resources.pools.registry import lookup_sync

    return lookup_sync(run_id).queue.name
