"""The trajectory writer and reader: shared files, sealed by size or age, whole or absent, read in the order asked."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.object_store import LocalObjectStore, ObjectStore
from resources.trajectories import store as store_module
from resources.trajectories.store import TrajectoryWriter, read_trajectories, run_dataset, trajectory_folder
from resources.trajectories.trajectory import Trajectory, TrajectoryRef
from tests.trajectory_factory import assert_same, make_trajectory

NEVER_S = 3600.0


@pytest.fixture
def store(store_url: str) -> ObjectStore:
    return ObjectStore.open(store_url)


async def _write_all(writer: TrajectoryWriter, trajectories: list[Trajectory]) -> list[TrajectoryRef]:
    """All at once, then close; returns when every row is sealed."""
    writes = [asyncio.ensure_future(writer.write(trajectory)) for trajectory in trajectories]
    await asyncio.sleep(0)  # every write has added its row
    await writer.close()
    return await asyncio.gather(*writes)


def _write(store: ObjectStore, members: range, worker: str = "cpu-0") -> list[TrajectoryRef]:
    writer = TrajectoryWriter(store, "run", worker, seal_after_s=NEVER_S)
    return asyncio.run(_write_all(writer, [make_trajectory(member) for member in members]))


def test_concurrent_callers_share_a_file(store: ObjectStore) -> None:
    refs = _write(store, range(4))
    assert len({ref.file for ref in refs}) == 1
    assert [ref.row for ref in refs] == [0, 1, 2, 3]
    assert store.list(trajectory_folder("run")) == [refs[0].file]


def test_rows_come_back_in_the_order_of_the_references(store: ObjectStore) -> None:
    refs = _write(store, range(3)) + _write(store, range(3, 5), "cpu-1")
    wanted = [4, 1, 1, 0, 3]
    read = read_trajectories(store, [refs[member] for member in wanted])
    for trajectory, member in zip(read, wanted, strict=True):
        assert_same(trajectory, make_trajectory(member))
    assert read_trajectories(store, []) == []


def test_a_run_is_one_dataset(store: ObjectStore) -> None:
    _write(store, range(3))
    _write(store, range(3, 5), "cpu-1")
    table = run_dataset(store, "run").to_table(columns=["member", "token_ids"])
    assert sorted(table.column("member").to_pylist()) == [0, 1, 2, 3, 4]


def test_a_file_is_sealed_when_it_is_full(tmp_path: Path) -> None:
    """No timer fires here: two rows of 13 kB fill a file of 20 kB, the third waits until the writer closes."""

    async def scenario() -> tuple[list[TrajectoryRef], TrajectoryRef]:
        writer = TrajectoryWriter(ObjectStore.open(tmp_path), "run", "cpu-0", seal_bytes=20_000, seal_after_s=NEVER_S)
        first = await asyncio.gather(*(writer.write(make_trajectory(m, num_tokens=1000)) for m in (0, 1)))
        third = asyncio.ensure_future(writer.write(make_trajectory(2)))
        await asyncio.sleep(0)
        assert not third.done()
        await writer.close()
        return first, await third

    first, third = asyncio.run(scenario())
    assert first[0].file == first[1].file != third.file
    assert third.row == 0


def test_a_file_is_sealed_when_its_first_row_is_old_enough(tmp_path: Path) -> None:
    """The clock is the loop's: with an age of 0 the next turn of the loop seals what is there."""

    async def scenario() -> TrajectoryRef:
        writer = TrajectoryWriter(ObjectStore.open(tmp_path), "run", "cpu-0", seal_after_s=0.0)
        return await writer.write(make_trajectory(3))

    ref = asyncio.run(scenario())
    assert_same(read_trajectories(ObjectStore.open(tmp_path), [ref])[0], make_trajectory(3))


def test_a_malformed_row_fails_alone(tmp_path: Path) -> None:
    """M15: the row with a log-probability too few is refused, its neighbours are written."""
    bad = make_trajectory(1, behaviour_logprobs=np.zeros(9, np.float32))
    store = ObjectStore.open(tmp_path)

    async def scenario() -> list[Any]:
        writer = TrajectoryWriter(store, "run", "cpu-0", seal_after_s=0.0)
        rows = [make_trajectory(0), bad, make_trajectory(2)]
        return await asyncio.gather(*(writer.write(row) for row in rows), return_exceptions=True)

    first, error, last = asyncio.run(scenario())
    assert isinstance(error, ValueError) and "never pad or re-encode" in str(error)
    assert [t.member for t in read_trajectories(store, [first, last])] == [0, 2]
    assert run_dataset(store, "run").count_rows() == 2


def test_a_caller_that_is_cancelled_leaves_the_others_alone(tmp_path: Path) -> None:
    async def scenario() -> TrajectoryRef:
        writer = TrajectoryWriter(ObjectStore.open(tmp_path), "run", "cpu-0", seal_after_s=NEVER_S)
        writes = [asyncio.ensure_future(writer.write(make_trajectory(member))) for member in (0, 1)]
        await asyncio.sleep(0)
        writes[0].cancel()
        await writer.close()
        return await writes[1]

    ref = asyncio.run(scenario())
    assert [t.member for t in read_trajectories(ObjectStore.open(tmp_path), [ref])] == [1]


class FailingStore(LocalObjectStore):
    """Fails the first ``failures`` creates, before or after the object is written."""

    def __init__(self, root: Path, failures: int, written: bool) -> None:
        super().__init__(str(root))
        self.failures = failures
        self.written = written

    def create(self, key: str, data: bytes | memoryview) -> bool:
        if self.failures:
            self.failures -= 1
            if self.written:
                super().create(key, data)
            raise OSError("connection lost")
        return super().create(key, data)


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
def test_a_lost_answer_is_retried_without_a_second_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    monkeypatch.setattr(store_module, "RETRY_AFTER_S", 0.0)
    store = FailingStore(tmp_path, failures=2, written=written)
    ref = _write(store, range(1))[0]
    assert store.list(trajectory_folder("run")) == [ref.file]
    assert_same(read_trajectories(store, [ref])[0], make_trajectory(0))


def test_s18_a_file_that_cannot_be_written_fails_its_rows_and_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S18: every caller is told, no file is visible, and the writer goes on with the next one."""
    monkeypatch.setattr(store_module, "RETRY_AFTER_S", 0.0)
    store = FailingStore(tmp_path, failures=3, written=False)

    async def scenario() -> tuple[list[Any], TrajectoryRef]:
        writer = TrajectoryWriter(store, "run", "cpu-0", seal_after_s=0.0)
        lost = await asyncio.gather(*(writer.write(make_trajectory(m)) for m in (0, 1)), return_exceptions=True)
        assert store.list() == []
        return lost, await writer.write(make_trajectory(2))

    lost, ref = asyncio.run(scenario())
    assert all(isinstance(e, InfrastructureFailure) and "connection lost" in str(e) for e in lost)
    assert [t.member for t in read_trajectories(store, [ref])] == [2]


class GatedStore(LocalObjectStore):
    """Writes nothing until its gate opens; counts the objects that wait there and the bytes they hold."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.gate = threading.Event()
        self.waiting_bytes = 0
        self.most_waiting_bytes = 0

    def create(self, key: str, data: bytes | memoryview) -> bool:
        self.waiting_bytes += len(data)
        self.most_waiting_bytes = max(self.most_waiting_bytes, self.waiting_bytes)
        assert self.gate.wait(30)
        self.waiting_bytes -= len(data)
        return super().create(key, data)


def test_s17_a_slow_store_holds_back_the_callers_and_not_a_pile_of_encoded_files(tmp_path: Path) -> None:
    """S17: 100 trajectories of 120k tokens and a store that stands still. A trajectory takes under 2 MiB, no caller
    goes on, and of the files that wait at most one is encoded."""
    mask = np.zeros(120_000, bool)
    long = make_trajectory(
        0,
        token_ids=np.zeros(120_000, np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.zeros(120_000, np.float32),
        token_versions=np.full(120_000, -1, np.int32),
        turns=[],
    )
    one = sum(a.nbytes for a in (long.token_ids, long.loss_mask, long.behaviour_logprobs, long.token_versions))
    assert one <= 2 * 2**20
    store = GatedStore(tmp_path)
    before = pa.total_allocated_bytes()

    async def scenario() -> tuple[int, int, list[TrajectoryRef]]:
        writer = TrajectoryWriter(store, "run", "cpu-0", seal_after_s=NEVER_S)
        writes = [asyncio.ensure_future(writer.write(long)) for _ in range(100)]
        await _until(lambda: store.waiting_bytes > 0)
        done, held = sum(write.done() for write in writes), pa.total_allocated_bytes() - before
        store.gate.set()
        await writer.close()
        return done, held, await asyncio.gather(*writes)

    done, held, refs = asyncio.run(scenario())
    assert done == 0
    assert held <= 2 * 4 * 2**20
    assert store.most_waiting_bytes <= 4 * 2**20 + one
    assert len({ref.file for ref in refs}) == 100 // 3 + 1  # three of 1.5 MiB reach the 4 MiB of a file


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_write_that_takes_too_long_says_what_it_waited_for(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)

    async def scenario() -> None:
        writer = TrajectoryWriter(store, "run", "cpu-0", seal_after_s=0.0, write_deadline_s=0.01)
        with pytest.raises(DeadlineExceeded, match=r"calculator-000007/5/0' was not in file://"):
            await writer.write(make_trajectory(5))
        store.gate.set()
        await writer.close()

    asyncio.run(scenario())


def test_s21_references_are_small() -> None:
    """S21: 512 trajectories of 1 MB are 512 references of a hundred bytes."""
    refs = [
        TrajectoryRef(f"runs/quickstart-20260101-000000-abcd/trajectories/cpu-0-12345678-{n:06d}.arrow", n)
        for n in range(512)
    ]
    assert len(pickle.dumps(refs)) < 512 * 120


def test_a_restarted_worker_does_not_meet_its_old_files(store: ObjectStore) -> None:
    first, second = _write(store, range(1)), _write(store, range(1, 2))
    assert first[0].file != second[0].file
    assert [t.member for t in read_trajectories(store, first + second)] == [0, 1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: None, "cannot be read"),
        (lambda data: data[: len(data) // 2], "cannot be read"),
    ],
    ids=["absent", "cut"],
)
def test_a_file_that_is_not_whole_is_named(
    store: ObjectStore, damage: Callable[[bytes], bytes | None], message: str
) -> None:
    ref = _write(store, range(1))[0]
    damaged = damage(store.get(ref.file))
    store.delete(ref.file)
    if damaged is not None:
        store.put(ref.file, damaged)
    with pytest.raises(InfrastructureFailure, match=message) as error:
        read_trajectories(store, [ref])
    assert ref.file in str(error.value)


def test_a_row_that_is_not_there_is_named(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path)
    ref = _write(store, range(2))[0]
    with pytest.raises(InfrastructureFailure, match=r"has 2 rows; \[0, 2\] were named"):
        read_trajectories(store, [ref, TrajectoryRef(ref.file, 2)])


def test_a_closed_writer_takes_nothing_and_a_worker_name_is_checked(tmp_path: Path) -> None:
    async def scenario() -> None:
        writer = TrajectoryWriter(ObjectStore.open(tmp_path), "run", "cpu-0")
        await writer.close()
        await writer.close()
        with pytest.raises(RuntimeError, match="closed"):
            await writer.write(make_trajectory())

    asyncio.run(scenario())
    with pytest.raises(ValueError, match="may hold no '/'"):
        TrajectoryWriter(ObjectStore.open(tmp_path), "run", "tcp:/127.0.0.1")
