"""One scorer process as its parent sees it: started warm, given one request at a time, killed with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from resources.failures import InfrastructureFailure
from resources.rewards.base import ScoringRequest
from resources.rewards.scorer_child import encode_frame

KILL_WAIT_S = 5.0
EXIT_WAIT_S = 0.2
"""A process that closed its pipe is given this long to end by itself, so that its exit code can be told."""
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""A scorer's answer that is larger than this is broken."""


class ScorerProcess:
    """Never blocks: reading and writing happen when the pool's selector says so.

    Start and keep it in a thread that lives as long as the process: on Linux it dies with the thread that started it.
    """

    def __init__(self) -> None:
        # The parent's own import path, so that a scorer found here is found there, whatever the working directory.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "resources.rewards.scorer_child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # its own process group: what a scorer starts is killed with it
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stdin = self._process.stdin
        self.stdout = self._process.stdout
        os.set_blocking(self.stdin.fileno(), False)
        os.set_blocking(self.stdout.fileno(), False)
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()
        self._ended_stream = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def wants_to_write(self) -> bool:
        return len(self._outgoing) > 0

    def send(self, request: ScoringRequest, arguments: dict[str, Any]) -> None:
        assert not self.wants_to_write, "a scorer process takes one request at a time"
        self._outgoing = memoryview(encode_frame({"request": asdict(request), "arguments": arguments}))
        self.write()

    def write(self) -> None:
        """Write what the pipe takes now. A process that is gone is noticed by `read`."""
        try:
            while self._outgoing:
                written = self.stdin.write(self._outgoing)
                if written is None:
                    return
                self._outgoing = self._outgoing[written:]
        except BrokenPipeError:
            self._outgoing = memoryview(b"")

    def read(self) -> dict[str, Any] | None:
        """The next whole message; None when there is none yet. Raises EOFError when the process has ended, or speaks
        nonsense."""
        while (piece := self.stdout.read(65536)) is not None:
            if not piece:
                self._ended_stream = True
                raise EOFError
            self._incoming += piece
        if len(self._incoming) < 4:
            return None
        (length,) = struct.unpack(">I", self._incoming[:4])
        if length > MAX_FRAME_BYTES:
            raise EOFError
        if len(self._incoming) < 4 + length:
            return None
        body, self._incoming = self._incoming[4 : 4 + length], self._incoming[4 + length :]
        return json.loads(body)

    def kill(self) -> str:
        """End the process and its group; returns how it ended. Raises InfrastructureFailure when it does not."""
        code = self._process.poll()
        if code is None and self._ended_stream:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=EXIT_WAIT_S)
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self.stdin.close()
        self.stdout.close()
        try:
            self._process.wait(timeout=KILL_WAIT_S)
        except subprocess.TimeoutExpired as error:
            raise InfrastructureFailure(
                f"scorer process {self._process.pid} is still there {KILL_WAIT_S:g} s after SIGKILL"
            ) from error
        if code is None:
            return "was killed"
        return f"ended with exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
