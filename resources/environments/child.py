"""What runs inside a child process that plays environments? A loop that answers calls over one socket.

Frames are 4 bytes of length (big endian) and JSON, both ways; never pickle: a child runs a user's code, and its parent
must not run what it sends. Calls run one after the other on the main thread (libraries that want signals find it), so
this file imports the standard library only, and the environment's own module when the first episode opens.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import inspect
import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
from typing import Any

FRAME_HEADER = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1


def main(file_number: int, parent: int) -> None:
    """Answer calls until the parent closes its end."""
    _end_with(parent)
    connection = socket.socket(fileno=file_number)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    loop = asyncio.new_event_loop()
    episodes: dict[int, Any] = {}
    while True:
        request = requests.get()
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            reply["result"] = _answer(request, episodes, loop)
            frame = json.dumps(reply, default=_plain).encode()
        except Exception as error:  # noqa: BLE001 - a user's code; the parent says whose it is
            reply.pop("result", None)
            reply["error"] = f"{type(error).__name__}: {error}"
            frame = json.dumps(reply).encode()
        connection.sendall(FRAME_HEADER.pack(len(frame)) + frame)


def _answer(request: dict[str, Any], episodes: dict[int, Any], loop: asyncio.AbstractEventLoop) -> Any:
    name, episode = request["call"], request["episode"]
    if name == "reset":
        from resources.environments.instances import instantiate_named

        episodes[episode] = instantiate_named(request["environment"], request["environment_arguments"])
    # One whose reset failed before it was made is closed all the same.
    environment = episodes.pop(episode, None) if name == "close" else episodes[episode]
    method = getattr(environment, name, None)
    if method is None:  # `close` and `judgement` may be left out
        return None
    result = method(*request.get("arguments", []))
    if inspect.isawaitable(result):
        result = loop.run_until_complete(_awaited(result))
    return dataclasses.asdict(result) if dataclasses.is_dataclass(result) and not isinstance(result, type) else result


async def _awaited(result: Any) -> Any:
    return await result


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON")


def _read(connection: socket.socket, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Beside the calls, so that a parent that is gone ends the process in the middle of one."""
    try:
        while True:
            (length,) = FRAME_HEADER.unpack(_exactly(connection, FRAME_HEADER.size))
            requests.put(json.loads(_exactly(connection, length)))
    except (OSError, EOFError):
        os.killpg(0, signal.SIGKILL)  # this process leads a session of its own: what the environment started ends too


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(num_bytes - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _end_with(parent: int) -> None:
    """Be killed when the parent dies, even while a call holds the interpreter. A terminal's Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
