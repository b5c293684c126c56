"""Running tests on untrusted code: a few fork servers, a cache of verdicts, and deadlines that hold.

Verdicts are a pure function of (code, tests), so the siblings of a group and later iterations hit the cache (85 to 95 %
of the calls of an RL run). Servers are plain subprocesses: they start in daemonic processes too, and never hold torch.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from resources.failures import InfrastructureFailure
from resources.sandbox.isolation import SandboxKind, sandbox_kind
from resources.sandbox.server_process import GRACE_S, START_DEADLINE_S, ServerProcess
from resources.sandbox.verdict import SandboxResult, Test, judge, parse_tests

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 5.0
MAX_CODE_CHARACTERS = 64 * 1024
QUEUE_DEADLINE_S = 120.0
"""Longest wait for a free server."""
_SET_UP_DONE = "limited\n"


class Sandbox:
    """Runs tests on untrusted code. Safe for many threads and event loops; call `close` at the end.

    ``num_servers`` calls run at once; each server starts when it is first needed (about 0.1 s).
    """

    def __init__(
        self,
        *,
        num_servers: int = 2,
        cache_size: int = 8192,
        memory_bytes: int = 512 * 1024 * 1024,
        kind: SandboxKind | None = None,
    ) -> None:
        """``kind`` None: the best that works here. ``cache_size``: verdicts kept, the least recently used goes first.
        ``memory_bytes``: address space of one call."""
        if num_servers < 1:
            raise ValueError(f"num_servers is {num_servers}; it must be at least 1")
        self._kind: SandboxKind | None = kind
        self._memory_bytes = memory_bytes
        self._cache_size = cache_size
        self._cache: OrderedDict[str, SandboxResult] = OrderedDict()
        self._lock = threading.Lock()
        self._idle: list[ServerProcess] = []
        self._num_servers = num_servers
        self._free = threading.Semaphore(num_servers)
        self._executor = ThreadPoolExecutor(num_servers, thread_name_prefix="sandbox")
        self._closed = False
        self._warned = False

    @property
    def kind(self) -> SandboxKind:
        return sandbox_kind() if self._kind is None else self._kind

    def run_tests(self, code: str, tests: list[str] | str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> SandboxResult:
        """Run ``code`` (a module's source), then each test, in a child that lives at most ``deadline_s`` seconds of
        wall time.

        Tests are statements; ``assert expression == literal`` is compared outside the sandbox and cannot be forged (see
        `resources.sandbox.verdict`). Whatever the code does is a result: only a broken *test* raises (ValueError), and
        a sandbox that is lost twice (InfrastructureFailure), which must leave a trajectory unscored.
        """
        parsed, key, known = self._look_up(code, tests, deadline_s)
        return known if known is not None else self._run(code, parsed, key, deadline_s)

    async def run_tests_async(
        self, code: str, tests: list[str] | str, *, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> SandboxResult:
        """As `run_tests`, without blocking the event loop."""
        parsed, key, known = self._look_up(code, tests, deadline_s)
        if known is not None:
            return known
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._run, code, parsed, key, deadline_s
        )

    def layers(self) -> list[str]:
        """The layers of isolation that are really on, as the server reports them (starts one if none runs)."""
        with self._slot():
            server = self._take_server()
            with self._lock:
                self._idle.append(server)
        return list(server.layers)

    def server_pids(self) -> list[int]:
        """Processes of the idle servers, for supervision and tests."""
        with self._lock:
            return [server.pid for server in self._idle]

    def close(self) -> None:
        """Wait for the calls that run (each has a deadline), then end every server. Later calls raise RuntimeError."""
        if self._closed:
            return
        self._closed = True
        self._executor.shutdown(wait=True, cancel_futures=True)
        for _ in range(self._num_servers):
            self._free.acquire(timeout=START_DEADLINE_S + GRACE_S)
        with self._lock:
            servers, self._idle = self._idle, []
        for server in servers:
            server.close()

    def forget(self) -> None:
        """In a forked copy of the owner: drop the servers without touching them."""
        for server in self._idle:
            server.forget()
        self._idle = []

    def _look_up(
        self, code: str, tests: list[str] | str, deadline_s: float
    ) -> tuple[list[Test], str, SandboxResult | None]:
        if self._closed:
            raise RuntimeError("this sandbox is closed")
        if not isinstance(code, str):
            raise ValueError(f"code is {type(code).__name__}; it must be a string of Python source")
        if not 0 < deadline_s <= 600:
            raise ValueError(f"deadline_s is {deadline_s}; it must be above 0 and at most 600 seconds")
        key = hashlib.sha256(json.dumps([code, tests]).encode()).hexdigest()
        with self._lock:
            known = self._cache.get(key)
            if known is not None:
                self._cache.move_to_end(key)
                return [], key, known
        parsed = parse_tests(tests)
        if len(code) > MAX_CODE_CHARACTERS:
            message = f"the code has more than {MAX_CODE_CHARACTERS} characters"
            return parsed, key, SandboxResult(False, message, num_tests=len(parsed))
        return parsed, key, None

    def _run(self, code: str, tests: list[Test], key: str, deadline_s: float) -> SandboxResult:
        nonce = secrets.token_hex(16)
        request = {
            "nonce": nonce,
            "code": code,
            "probes": [test.probe() for test in tests],
            "deadline_s": deadline_s,
            "memory_bytes": self._memory_bytes,
        }
        with self._slot():
            reply = self._call(request)
        report = str(reply["report"])
        if reply["state"] == "finished":
            if not report.startswith(_SET_UP_DONE):
                raise InfrastructureFailure(f"the sandbox could not limit its child (exit code {reply['exit_code']})")
            reply = {**reply, "report": report[len(_SET_UP_DONE) :]}
        result = judge(tests, reply, nonce)
        # A deadline that was missed may be the machine's doing: it is reported, never remembered.
        if not result.timed_out:
            with self._lock:
                self._cache[key] = dataclasses.replace(result, cached=True)
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
        return result

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        if not self._free.acquire(timeout=QUEUE_DEADLINE_S):
            raise InfrastructureFailure(
                f"none of {self._num_servers} sandbox servers was free for {QUEUE_DEADLINE_S:g} s"
            )
        try:
            yield
        finally:
            self._free.release()

    def _call(self, request: dict[str, object]) -> dict[str, object]:
        """One exchange; a lost server is replaced once, because what it ran was not its doing."""
        for attempt in (1, 2):
            server = self._take_server()
            try:
                reply = server.call(request)
            except InfrastructureFailure:
                server.close()
                if attempt == 2:
                    raise
                continue
            except BaseException:
                server.close()  # interrupted halfway: its stream cannot be trusted any more
                raise
            with self._lock:
                self._idle.append(server)
            return reply
        raise AssertionError("unreachable")

    def _take_server(self) -> ServerProcess:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        server = ServerProcess(self.kind)
        if "syscall filter" not in server.layers and not self._warned:
            self._warned = True
            logger.warning(
                "the sandbox runs without a system call filter (this kernel or architecture has none for it): code "
                "under test may start processes and open files for writing; only these layers are on: %s",
                ", ".join(server.layers) or "none",
            )
        return server


# One sandbox for a process: verdicts are a pure function of their arguments, so sharing it between runs cannot be seen,
# and the environments of hundreds of episodes must not start a server each.
_shared_lock = threading.Lock()
_shared: tuple[int, Sandbox] | None = None


def shared_sandbox() -> Sandbox:
    """The sandbox of this process, started on first use and closed at exit; a forked copy gets its own."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared[0] != os.getpid():
            if _shared is not None:
                _shared[1].forget()
            sandbox = Sandbox()
            atexit.register(sandbox.close)
            _shared = (os.getpid(), sandbox)
        return _shared[1]


def run_tests(code: str, tests: list[str] | str, *, deadline_s: float = DEFAULT_DEADLINE_S) -> SandboxResult:
    """`Sandbox.run_tests` on the sandbox of this process."""
    return shared_sandbox().run_tests(code, tests, deadline_s=deadline_s)


async def run_tests_async(
    code: str, tests: list[str] | str, *, deadline_s: float = DEFAULT_DEADLINE_S
) -> SandboxResult:
    """`Sandbox.run_tests_async` on the sandbox of this process."""
    return await shared_sandbox().run_tests_async(code, tests, deadline_s=deadline_s)
