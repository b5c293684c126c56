"""The trajectory store: many coroutines share immutable Arrow files, and a reference is (file, row)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.dataset as ds

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.object_store import ObjectStore, checked_key
from resources.trajectories.arrow_files import encode_arrow
from resources.trajectories.schema import SCHEMA_V2, from_table, to_table
from resources.trajectories.trajectory import Trajectory, TrajectoryRef

SEAL_BYTES = 4 * 2**20
SEAL_AFTER_S = 0.2
WRITE_ATTEMPTS = 3
RETRY_AFTER_S = 0.2
READ_THREADS = 8


def trajectory_folder(run_id: str) -> str:
    """Folder of a run's trajectory files, under the root of the store."""
    return f"runs/{run_id}/trajectories"


@dataclass(slots=True)
class _Row:
    trajectory: Trajectory
    sealed: asyncio.Future[TrajectoryRef]


@dataclass(slots=True)
class _Pending:
    """Rows of the file that is being collected."""

    rows: list[_Row] = field(default_factory=list)
    num_bytes: int = 0
    timer: asyncio.TimerHandle | None = None


class TrajectoryWriter:
    """Writes the trajectories of one rollout worker. Used from one event loop; encoding and I/O run in a thread.

    A file is sealed when it holds ``seal_bytes`` or its first row is ``seal_after_s`` old, and becomes visible whole
    and once. Files are written one after the other, and `write` returns only when its row is durable: a slow store
    holds back the callers, and nothing piles up here beyond the trajectories that they wait with (S17).
    """

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        worker_id: str,
        *,
        seal_bytes: int = SEAL_BYTES,
        seal_after_s: float = SEAL_AFTER_S,
        write_deadline_s: float = 600.0,
    ) -> None:
        """Raises ValueError when ``worker_id`` cannot be part of a file name."""
        if "/" in checked_key(worker_id):
            raise ValueError(f"worker_id is {worker_id!r}; it names files, so it may hold no '/'")
        self._store = store
        self._seal_bytes = seal_bytes
        self._seal_after_s = seal_after_s
        self._write_deadline_s = write_deadline_s
        # A worker that is restarted under its old name must not meet its old files.
        self._prefix = f"{trajectory_folder(run_id)}/{worker_id}-{secrets.token_hex(4)}"
        self._num_files = 0
        self._pending = _Pending()
        self._sealing: set[asyncio.Task[None]] = set()
        self._io_order = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trajectory-writer")
        self._closed = False

    async def write(self, trajectory: Trajectory) -> TrajectoryRef:
        """Add one row; returns where it lies once its file is in the store.

        Raises ValueError when this row is malformed (the others of its file are written all the same),
        InfrastructureFailure when the store refuses the file, DeadlineExceeded after ``write_deadline_s``.
        """
        if self._closed:
            raise RuntimeError(f"the trajectory writer of {self._prefix} is closed; it takes no more rows")
        loop = asyncio.get_running_loop()
        row = _Row(trajectory, loop.create_future())
        pending = self._pending
        pending.rows.append(row)
        pending.num_bytes += _estimate_bytes(trajectory)
        if pending.num_bytes >= self._seal_bytes:
            self._seal()
        elif pending.timer is None:
            pending.timer = loop.call_later(self._seal_after_s, self._seal)
        try:
            return await asyncio.wait_for(row.sealed, self._write_deadline_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"trajectory {trajectory.trajectory_id!r} was not in {self._store.url} after {self._write_deadline_s} s"
            ) from None

    async def close(self) -> None:
        """Seal what is left and wait for every file. No-op when closed before."""
        self._closed = True
        self._seal()
        while self._sealing:
            await asyncio.wait(self._sealing)
        self._thread.shutdown(wait=False)

    def _seal(self) -> None:
        pending, self._pending = self._pending, _Pending()
        if pending.timer is not None:
            pending.timer.cancel()
        if pending.rows:
            key = f"{self._prefix}-{self._num_files:06d}.arrow"
            self._num_files += 1
            task = asyncio.get_running_loop().create_task(self._write_file(key, pending.rows))
            self._sealing.add(task)
            task.add_done_callback(self._sealing.discard)

    async def _write_file(self, key: str, rows: list[_Row]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with (
                self._io_order
            ):  # encoded one at a time, so that one file's bytes are held and not a queue of them
                data, good = await loop.run_in_executor(self._thread, _encode_rows, rows, loop)
                if good:
                    await self._create(key, data)
        except Exception as error:  # noqa: BLE001 - handed to every caller that waits for this file
            for row in rows:
                _fail(row, InfrastructureFailure(f"trajectory file {self._store.uri(key)} was not written: {error}"))
            return
        for position, row in enumerate(good):
            if not row.sealed.done():
                row.sealed.set_result(TrajectoryRef(key, position))

    async def _create(self, key: str, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        for attempt in range(WRITE_ATTEMPTS):
            try:
                if not await loop.run_in_executor(self._thread, self._store.create, key, data):
                    # An attempt whose answer was lost may have written it: the name is ours alone.
                    written = await loop.run_in_executor(self._thread, self._store.get, key)
                    assert written == data, f"{key} holds another file"
                return
            except OSError:
                if attempt == WRITE_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(RETRY_AFTER_S * 2**attempt)


def read_trajectories(store: ObjectStore, refs: Sequence[TrajectoryRef]) -> list[Trajectory]:
    """The rows that ``refs`` name, in their order. Every file is opened once, whatever the number of its rows.

    Raises InfrastructureFailure naming the file when one is missing or damaged, or has no such row.
    """
    wanted: dict[str, list[int]] = {}
    for ref in refs:
        wanted.setdefault(ref.file, []).append(ref.row)
    if not wanted:
        return []
    file_system, base = store.arrow()

    def read(file: str) -> list[Trajectory]:
        rows = wanted[file]
        try:
            with file_system.open_input_file(f"{base}/{checked_key(file)}") as source:
                table = pa.ipc.open_file(source).read_all()
                if max(rows) >= table.num_rows or min(rows) < 0:
                    raise InfrastructureFailure(
                        f"{store.uri(file)} has {table.num_rows} rows; {sorted(rows)} were named"
                    )
                return from_table(table if rows == list(range(table.num_rows)) else table.take(rows))
        except (OSError, ValueError) as error:
            raise InfrastructureFailure(f"trajectory file {store.uri(file)} cannot be read: {error}") from error

    with ThreadPoolExecutor(min(READ_THREADS, len(wanted)), thread_name_prefix="trajectory-reader") as threads:
        read_rows = {file: iter(rows) for file, rows in zip(wanted, threads.map(read, wanted), strict=True)}
    return [next(read_rows[ref.file]) for ref in refs]


def run_dataset(store: ObjectStore, run_id: str) -> ds.Dataset:
    """All trajectory files that the run has now, as one dataset of SCHEMA_V2 (no rows when there are none).

    DuckDB queries it as it is (``duckdb.sql("select family, avg(reward) from dataset group by 1")``); Polars also reads
    the files directly (``polars.scan_ipc(".../trajectories/*.arrow")``).
    """
    return arrow_dataset(store, trajectory_folder(run_id), SCHEMA_V2)


def arrow_dataset(store: ObjectStore, folder: str, schema: pa.Schema) -> ds.Dataset:
    """The ``*.arrow`` files under a folder of the store as one dataset with a fixed schema."""
    file_system, base = store.arrow()
    files = [f"{base}/{key}" for key in store.list(folder) if key.endswith(".arrow")]
    if not files:
        return ds.dataset(schema.empty_table())
    return ds.dataset(files, schema=schema, format="ipc", filesystem=file_system)


def _encode_rows(rows: list[_Row], loop: asyncio.AbstractEventLoop) -> tuple[bytes, list[_Row]]:
    """The file of all rows that are well-formed, and those rows; the others are failed one by one."""
    try:
        return encode_arrow(to_table([row.trajectory for row in rows])), rows
    except (ValueError, TypeError):
        good = []
        for row in rows:
            try:
                to_table([row.trajectory])
                good.append(row)
            except (ValueError, TypeError) as error:
                loop.call_soon_threadsafe(_fail, row, error)
        return encode_arrow(to_table([row.trajectory for row in good])), good


def _fail(row: _Row, error: Exception) -> None:
    if not row.sealed.done():
        row.sealed.set_exception(error)


def _estimate_bytes(trajectory: Trajectory) -> int:
    arrays = (
        trajectory.token_ids,
        trajectory.loss_mask,
        trajectory.behaviour_logprobs,
        trajectory.token_versions,
    )
    text = sum(len(message["content"]) for message in trajectory.messages) + len(trajectory.final_state)
    return sum(array.nbytes for array in arrays) + text + 200 * len(trajectory.turns)
