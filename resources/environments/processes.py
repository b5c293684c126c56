"""Where does environment code run that must be ended when it hangs? In child processes: a bounded number for a family,
each killed at the deadline of a call and replaced when the next episode wants it.

| who waits  | for what                     | until, at the latest                                                  |
|------------|------------------------------|-----------------------------------------------------------------------|
| an episode | a child with room            | ``processes.slot_deadline_s``                                         |
| an episode | its environment, in a child  | the family's deadlines; the child is killed then, waited for or not   |
| the pool   | a killed child to be gone    | `_GONE_DEADLINE_S`                                                    |

Children are plain programs that talk over a socket: Dask's workers are daemonic and may not start
``multiprocessing`` ones.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from resources.environments.base import Message, StepOutcome
from resources.environments.child import FRAME_HEADER
from resources.environments.family import FamilyConfig
from resources.environments.instances import instantiate_named
from resources.failures import EnvironmentFailure

_GONE_DEADLINE_S = 10.0
_SEND_DEADLINE_S = 1.0
_MAX_FRAME_BYTES = 64 * 1024 * 1024


class ChildProcess:
    """One child. Its calls each have a deadline at which the child is killed; every call that it still owes an answer
    then fails with an EnvironmentFailure. Belongs to the event loop that made it."""

    def __init__(self, family: str) -> None:
        self.num_episodes = 0
        self.failure: EnvironmentFailure | None = None
        """Why it can take no further call."""
        self._family = family
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "resources.environments.child", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        self._socket = ours
        self._gone: asyncio.Task[None] | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(self, name: str, episode: int, deadline_s: float, **more: Any) -> Any:
        """What the environment of ``episode`` answers to one call. Raises EnvironmentFailure."""
        if self.failure is not None:
            raise self.failure
        loop = asyncio.get_running_loop()
        request = next(self._ids)
        answer = self._waiting[request] = loop.create_future()
        # Nobody may be waiting any more when it fails: the episode was cancelled, and the deadline holds all the same.
        answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        message = f"{self._family}: {name} did not return within {deadline_s:g} s; its process was killed"
        timer = loop.call_later(deadline_s, self.kill, message)
        answer.add_done_callback(lambda _: timer.cancel())
        self._send({"id": request, "call": name, "episode": episode, **more})
        return await asyncio.shield(answer)

    def kill(self, reason: str) -> None:
        """End the process and whatever it started; calls that wait fail for this reason. No-op when it has ended."""
        if self.failure is not None:
            return
        self.failure = EnvironmentFailure(reason)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        self._gone = asyncio.get_running_loop().create_task(self._reap())
        self._reading.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.failure)
        self._waiting.clear()

    async def close(self) -> None:
        """Kill it and wait until it is gone."""
        self.kill(f"{self._family}: the rollout worker ends")
        if self._gone is not None:
            await self._gone

    @property
    def is_gone(self) -> bool:
        """Ended, and its number given back."""
        return self._process.poll() is not None

    async def _reap(self) -> None:
        await asyncio.wait([self._reading])
        self._socket.close()
        loop = asyncio.get_running_loop()
        end, pause = loop.time() + _GONE_DEADLINE_S, 0.001
        while self._process.poll() is None and loop.time() < end:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _send(self, request: Mapping[str, Any]) -> None:
        data = json.dumps(request).encode()
        try:
            # A request is one action and fits the socket's buffer, so this does not wait; one that does not fit waits
            # for a thread of the child that does nothing but read.
            self._socket.settimeout(_SEND_DEADLINE_S)
            self._socket.sendall(FRAME_HEADER.pack(len(data)) + data)
        except OSError as error:
            self.kill(f"{self._family}: the environment's process takes no more calls ({error})")
        finally:
            self._socket.setblocking(False)

    async def _read(self) -> None:
        self._socket.setblocking(False)
        try:
            while True:
                (length,) = FRAME_HEADER.unpack(await self._exactly(FRAME_HEADER.size))
                if length > _MAX_FRAME_BYTES:
                    raise ValueError(f"it sent {length} bytes at once; allowed are {_MAX_FRAME_BYTES}")
                self._resolve(json.loads(await self._exactly(length)))
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            self.kill(f"{self._family}: the environment's process broke off ({error or 'it ended'})")

    async def _exactly(self, num_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            part = await asyncio.get_running_loop().sock_recv(self._socket, num_bytes - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _resolve(self, reply: Mapping[str, Any]) -> None:
        answer = self._waiting.pop(reply["id"])
        if "error" in reply:
            answer.set_exception(EnvironmentFailure(f"{self._family}: the environment raised {reply['error']}"))
        else:
            answer.set_result(reply["result"])


class ChildProcesses:
    """The children of one family in one worker: at most ``max_processes``, each with at most ``episodes_per_process``
    episodes. Belongs to one event loop."""

    def __init__(
        self, family: str, config: FamilyConfig, *, start: Callable[[str], ChildProcess] = ChildProcess
    ) -> None:
        self._family, self._config, self._start = family, config.processes, start
        self._children: list[ChildProcess] = []
        self._ending: set[ChildProcess] = set()
        self._room = asyncio.Condition()

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children if child.failure is None]

    async def acquire(self) -> ChildProcess:
        """A child with room for an episode, which holds a place in it until `release`.

        Raises EnvironmentFailure when none has room within ``slot_deadline_s``.
        """
        async with self._room:
            try:
                async with asyncio.timeout(self._config.slot_deadline_s):
                    while (child := self._with_room()) is None:
                        await self._room.wait()
            except TimeoutError:
                raise EnvironmentFailure(
                    f"{self._family}: {len(self._children)} processes with {self._config.episodes_per_process} "
                    f"episodes each had no room for {self._config.slot_deadline_s:g} s; raise processes.max_processes "
                    "or processes.episodes_per_process, or lower max_concurrent_groups"
                ) from None
            child.num_episodes += 1
            return child

    async def release(self, child: ChildProcess) -> None:
        child.num_episodes -= 1
        async with self._room:
            self._room.notify()

    async def close(self) -> None:
        """Kill every child and wait until they are gone."""
        children, self._children = self._children, []
        await asyncio.gather(*(child.close() for child in [*children, *self._ending]))
        self._ending.clear()

    def _with_room(self) -> ChildProcess | None:
        self._ending |= {child for child in self._children if child.failure is not None}
        self._ending = {child for child in self._ending if not child.is_gone}
        self._children = [child for child in self._children if child.failure is None]
        free = [child for child in self._children if child.num_episodes < self._config.episodes_per_process]
        if free:
            return min(free, key=lambda child: child.num_episodes)
        if len(self._children) < self._config.max_processes:
            self._children.append(self._start(self._family))
            return self._children[-1]
        return None


class ProcessEnvironment:
    """An environment in a child process. Meets the environment protocol; `judgement` is to be awaited."""

    _episodes = itertools.count()

    def __init__(self, family: str, config: FamilyConfig, children: ChildProcesses) -> None:
        self._config, self._children = config, children
        self._child: ChildProcess | None = None
        self._episode = next(self._episodes)
        self.env_version, self.max_turns = _facts(config.environment, json.dumps(config.arguments))

    async def reset(self, seed: int) -> list[Message]:
        self._child = await self._children.acquire()
        deadline_s = self._config.reset_deadline_s
        named = {"environment": self._config.environment, "environment_arguments": self._config.arguments}
        return await self._child.call("reset", self._episode, deadline_s, arguments=[seed], **named)

    async def step(self, action: str) -> StepOutcome:
        fields = await self._call("step", self._config.step_deadline_s, action)
        try:
            return StepOutcome(**fields)
        except TypeError:
            raise EnvironmentFailure(f"step returned {fields!r}, not StepOutcome") from None

    async def judgement(self) -> dict[str, Any] | None:
        return await self._call("judgement", self._config.step_deadline_s)

    async def close(self) -> None:
        """Close the environment, when a call in progress has ended, and give its place to another episode."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            if child.failure is None:
                await child.call("close", self._episode, self._config.step_deadline_s)
        finally:
            await self._children.release(child)

    async def _call(self, name: str, deadline_s: float, *arguments: Any) -> Any:
        assert self._child is not None, "reset comes first"
        return await self._child.call(name, self._episode, deadline_s, arguments=arguments)


@functools.lru_cache(maxsize=1024)
def _facts(environment: str, arguments: str) -> tuple[str, int]:
    """(env_version, max_turns): the same for every instance, so one instance tells."""
    instance = instantiate_named(environment, json.loads(arguments))
    return instance.env_version, instance.max_turns
