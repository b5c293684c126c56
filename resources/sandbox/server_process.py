"""How is a fork server owned from outside? Start it, exchange frames under a deadline, end it with everything in it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import tempfile
import time
from typing import Any

from resources.failures import InfrastructureFailure
from resources.sandbox.isolation import SandboxKind, server_command, server_environment

START_DEADLINE_S = 30.0
GRACE_S = 10.0
"""The server itself ends a call at its deadline; only when it has not answered this much later is it ended from
here."""
MAX_FRAME_BYTES = 4 * 1024 * 1024


class ServerProcess:
    """One fork server: one call at a time. Not safe for several threads at once.

    It sees its stdin end and goes, whether `close` was called or this process was killed. Nothing of it stays behind.
    """

    def __init__(self, kind: SandboxKind) -> None:
        """Raises InfrastructureFailure when the server does not come up within `START_DEADLINE_S`."""
        self._process = subprocess.Popen(
            server_command(kind),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**server_environment(), "PATH": os.environ.get("PATH", os.defpath)},
            cwd=tempfile.gettempdir(),
            start_new_session=True,  # Ctrl-C of the terminal is not for it, and the whole session can be killed at once
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)
        os.set_blocking(self._replies, False)
        try:
            self.layers: list[str] = self._read(time.monotonic() + START_DEADLINE_S, "start")["ready"]
        except InfrastructureFailure:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one request (see `resources.sandbox.fork_server`) and return the server's reply.

        Raises InfrastructureFailure when the server is lost or silent; it must then be closed.
        """
        end = time.monotonic() + request["deadline_s"] + GRACE_S
        data = json.dumps(request).encode()
        self._write(struct.pack("!I", len(data)) + data, end)
        return self._read(end, "answer")

    def close(self) -> None:
        """End the server and whatever runs in it; returns when it is reaped."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # it may have died with a request half written
                    stream.close()
        try:
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            # Its session holds bubblewrap's monitor and process 1 of its namespace; the kernel ends the rest with that.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=GRACE_S)

    def forget(self) -> None:
        """In a forked copy of the owner: let go of the pipes, so that the true owner's death is still seen."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.returncode = 0  # not a child of this process: nothing to wait for here

    def _write(self, data: bytes, end: float) -> None:
        poller = select.poll()
        poller.register(self._requests, select.POLLOUT)
        while data:
            self._await(poller, end, "take its request")
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise InfrastructureFailure(f"the sandbox server (process {self.pid}) is gone") from error

    def _read(self, end: float, what: str) -> dict[str, Any]:
        poller = select.poll()
        poller.register(self._replies, select.POLLIN)
        data, size = b"", 4
        while len(data) < size:
            self._await(poller, end, what)
            try:
                piece = os.read(self._replies, size - len(data))
            except BlockingIOError:
                continue
            if not piece:
                raise InfrastructureFailure(f"the sandbox server (process {self.pid}) is gone; it did not {what}")
            data += piece
            if size == 4 and len(data) == 4:
                size += struct.unpack("!I", data)[0]
                assert size <= MAX_FRAME_BYTES, size
        return json.loads(data[4:])

    def _await(self, poller: select.poll, end: float, what: str) -> None:
        if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
            raise InfrastructureFailure(f"the sandbox server (process {self.pid}) did not {what} before its deadline")
