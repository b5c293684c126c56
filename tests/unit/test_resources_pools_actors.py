"""Calls on plain objects: what the other rooms' tests use in place of actors."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.pools.actors import ActorHandle, call, call_sync


class Adder:
    def __init__(self) -> None:
        self.total = 0

    def add(self, value: int, *, times: int = 1) -> int:
        self.total += value * times
        return self.total

    async def add_later(self, value: int) -> int:
        await asyncio.sleep(0)
        return self.add(value)

    async def never(self) -> None:
        await asyncio.Event().wait()


def test_plain_objects_are_called_in_place() -> None:
    async def play() -> list[int]:
        adder = Adder()
        return [await call(adder, "add", 2, times=3), await call(adder, "add_later", 4)]

    assert asyncio.run(play()) == [6, 10]


def test_plain_objects_are_called_from_threads_without_a_loop() -> None:
    adder = Adder()
    assert call_sync(adder, "add", 2, timeout_s=1) == 2
    assert call_sync(adder, "add_later", 3, timeout_s=1) == 5


def test_deadline_names_the_method() -> None:
    with pytest.raises(DeadlineExceeded, match=r"Adder did not answer never\(\) within 0.01 s"):
        call_sync(Adder(), "never", timeout_s=0.01)


def test_call_sync_refuses_to_block_a_loop() -> None:
    async def play() -> None:
        call_sync(Adder(), "add", 1, timeout_s=1)

    with pytest.raises(RuntimeError, match="would block the event loop"):
        asyncio.run(play())


def test_a_process_without_a_cluster_says_so() -> None:
    handle = ActorHandle("queue", "GroupQueue", "queue-1", "tcp://127.0.0.1:9", "tcp://127.0.0.1:8")
    with pytest.raises(InfrastructureFailure, match="no link to a Dask cluster"):
        asyncio.run(call(handle, "stats"))


def test_a_handle_travels_without_its_owner() -> None:
    handle = ActorHandle("queue", "GroupQueue", "queue-1", "tcp://h:1", "tcp://h:0", owner=object())  # type: ignore[arg-type]
    copy = pickle.loads(pickle.dumps(handle))
    assert copy == handle
    assert copy.owner is None
    assert str(copy) == "actor queue (GroupQueue on tcp://h:1)"
