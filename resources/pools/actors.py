"""How is a method of an actor called, from any event loop or thread of any process?

An actor call is one message to the worker that hosts the actor and one back. The handles of `distributed.Actor` reach
it through the scheduler when they are used in a client, open a client of their own in every worker that unpickles one,
and find no connection at all in a thread that Dask did not start. So calls go here: straight to the worker, over the
connections of the process's own Dask node (`resources.pools.link`), run on its loop and awaited on the caller's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from dataclasses import dataclass, field
from typing import Any

from distributed import Actor, Future
from distributed.comm.core import Comm
from distributed.core import send_recv
from distributed.protocol.serialize import to_serialize

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.pools.link import DaskLink, find_link

LOSS_CHECK_S = 0.5
"""Dask retries a refused connection for its whole connect timeout (30 s); this often we ask whether the actor lives."""
SCHEDULER_REPLY_S = 30.0
"""A scheduler that does not answer within this time counts as lost."""


@dataclass(frozen=True)
class ActorHandle:
    """Where an actor lives. Picklable and tiny; every process can call it. The process that started it owns it."""

    name: str
    """For people: ``engine-compute-0``."""
    class_name: str
    key: str
    """Dask key, unique in the cluster."""
    worker: str
    """Address of the worker that hosts it."""
    scheduler: str
    owner: Future | None = field(default=None, repr=False, compare=False)
    """Keeps the actor alive. Stays in the process that started it: when that ends, Dask releases the actor."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorHandle, (self.name, self.class_name, self.key, self.worker, self.scheduler)

    def __str__(self) -> str:
        return f"actor {self.name} ({self.class_name} on {self.worker})"


async def call(actor: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``actor.method(*args, **kwargs)`` and await its result.

    Args:
        actor: an `ActorHandle`, a `distributed.Actor`, or any plain object (called in place; an awaitable is awaited).
        method: name of the method; async methods run together on the actor's worker, sync ones one at a time.

    The call runs at most once. Cancelling the caller drops the answer, the method itself runs on: give methods that
    wait an argument that bounds the wait.

    Raises:
        InfrastructureFailure: the actor or its worker is gone (known within about a second), or the process has no
            link to a cluster. Whatever the method raises arrives as it is.
    """
    handle = _as_handle(actor)
    if handle is None:
        result = getattr(actor, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result
    link = find_link(handle.scheduler)
    execution = _execute(link, handle, method, args, kwargs)
    if asyncio.get_running_loop() is link.loop:
        return await execution
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(execution, link.loop))


def call_sync(actor: Any, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """`call` for threads without an event loop, with a deadline.

    Raises:
        DeadlineExceeded: no answer within ``timeout_s`` seconds; names the actor and the method.
        RuntimeError: called on an event loop, which it would block.
    """
    handle = _as_handle(actor)
    _refuse_running_loop(method)
    if handle is None:
        return _call_plain_sync(actor, method, args, kwargs, timeout_s)
    link = find_link(handle.scheduler)
    answer = asyncio.run_coroutine_threadsafe(_execute(link, handle, method, args, kwargs), link.loop)
    try:
        return answer.result(timeout_s)
    except concurrent.futures.TimeoutError:
        if answer.done():  # the method itself raised a TimeoutError
            raise
        answer.cancel()
        raise DeadlineExceeded(f"{handle} did not answer {method}() within {timeout_s:g} s") from None


async def actor_lives(link: DaskLink, handle: ActorHandle) -> bool:
    """Whether the scheduler still knows a worker that hosts the actor. To be awaited on ``link.loop``."""
    try:
        async with asyncio.timeout(SCHEDULER_REPLY_S):
            hosts = await link.scheduler.who_has(keys=[handle.key])
    except (OSError, TimeoutError) as error:
        raise InfrastructureFailure(f"the Dask scheduler at {link.scheduler_address} does not answer") from error
    return bool(hosts.get(handle.key))


def lives_sync(handle: ActorHandle, *, timeout_s: float = SCHEDULER_REPLY_S) -> bool:
    """`actor_lives` for threads without an event loop."""
    link = find_link(handle.scheduler)
    answer = asyncio.run_coroutine_threadsafe(actor_lives(link, handle), link.loop)
    try:
        return answer.result(timeout_s)
    except concurrent.futures.TimeoutError:
        answer.cancel()
        raise DeadlineExceeded(f"whether {handle} lives was not known within {timeout_s:g} s") from None


async def _execute(link: DaskLink, handle: ActorHandle, method: str, args: Any, kwargs: dict[str, Any]) -> Any:
    if link.worker is not None and link.worker.address == handle.worker:
        if handle.key not in link.worker.state.actors:
            raise InfrastructureFailure(f"{handle} is gone: it was released")
        reply = await link.worker.actor_execute(actor=handle.key, function=method, args=args, kwargs=kwargs)
        if reply["status"] == "OK":
            return reply["result"].data
        raise reply["exception"].data
    comm = await _connect(link, handle, method)
    try:
        reply: Any = await send_recv(
            comm,
            op="actor_execute",
            actor=handle.key,
            function=method,
            args=[to_serialize(value) for value in args],
            kwargs={name: to_serialize(value) for name, value in kwargs.items()},
        )
    except OSError as error:
        raise InfrastructureFailure(f"{handle} was lost during {method}(): its worker is gone") from error
    except KeyError as error:
        if error.args != (handle.key,):
            raise
        raise InfrastructureFailure(f"{handle} is gone: it was released, or its worker was restarted") from error
    finally:
        link.pool.reuse(handle.worker, comm)
    if reply["status"] == "OK":
        return reply["result"]
    raise reply["exception"]


async def _connect(link: DaskLink, handle: ActorHandle, method: str) -> Comm:
    connecting = asyncio.ensure_future(link.pool.connect(handle.worker))
    try:
        while not (await asyncio.wait({connecting}, timeout=LOSS_CHECK_S))[0]:
            if not await actor_lives(link, handle):
                raise InfrastructureFailure(f"{handle} was lost before {method}(): its worker is gone")
        return connecting.result()
    except OSError as error:
        raise InfrastructureFailure(f"{handle} cannot be reached for {method}()") from error
    except asyncio.CancelledError:
        connecting.add_done_callback(lambda task: _give_back(link, handle, task))
        raise
    finally:
        connecting.cancel()


def _give_back(link: DaskLink, handle: ActorHandle, connecting: asyncio.Future[Comm]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        link.pool.reuse(handle.worker, connecting.result())


def _as_handle(actor: Any) -> ActorHandle | None:
    if isinstance(actor, ActorHandle):
        return actor
    if isinstance(actor, Actor):
        return ActorHandle(str(actor.key), actor._cls.__name__, str(actor.key), actor._address, scheduler="")
    return None


def _refuse_running_loop(method: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"call_sync(..., {method!r}) would block the event loop it runs on; await call(...) instead")


def _call_plain_sync(actor: Any, method: str, args: Any, kwargs: dict[str, Any], timeout_s: float) -> Any:
    async def awaited(result: Any) -> Any:
        return await result

    result = getattr(actor, method)(*args, **kwargs)
    if not inspect.isawaitable(result):
        return result
    try:
        return asyncio.run(asyncio.wait_for(awaited(result), timeout_s))
    except TimeoutError:
        raise DeadlineExceeded(f"{type(actor).__name__} did not answer {method}() within {timeout_s:g} s") from None
