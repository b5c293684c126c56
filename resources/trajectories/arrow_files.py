"""How a table becomes one immutable object: an Arrow IPC file, buffers compressed, read back as it is by anybody."""

from __future__ import annotations

import pyarrow as pa

COMPRESSION = "zstd"
"""zstd, not lz4: see `benchmarks.trajectories` for size and speed of both."""


def encode_arrow(table: pa.Table, compression: str | None = COMPRESSION) -> bytes:
    """The table as the bytes of an Arrow IPC file (``*.arrow``), one record batch."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue().to_pybytes()


def decode_arrow(data: bytes | memoryview | pa.Buffer) -> pa.Table:
    """Inverse of `encode_arrow`. Raises pa.ArrowInvalid when the bytes are not a whole Arrow IPC file."""
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        return reader.read_all()
