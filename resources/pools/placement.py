"""On which worker does an actor live? Placement is ours: a live actor holds none of the worker's resources."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar
from uuid import uuid4

from distributed import Client
from distributed import TimeoutError as DaskTimeoutError

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.pools.actors import ActorHandle
from resources.pools.link import scheduler_address

_T = TypeVar("_T")


def workers_by_class(client: Client) -> dict[str, list[str]]:
    """Addresses of the workers of every hardware class, in the order of the workers' names."""
    workers: Mapping[str, Any] = client.scheduler_info()["workers"]
    found: dict[str, list[str]] = defaultdict(list)
    for address, worker in sorted(workers.items(), key=lambda item: str(item[1]["name"])):
        for hardware_class in worker["resources"]:
            found[hardware_class].append(address)
    return dict(found)


def start_actor(
    client: Client, cls: type[_T], *args: Any, worker: str, name: str, timeout_s: float = 60.0, **kwargs: Any
) -> ActorHandle:
    """Build ``cls(*args, **kwargs)`` as an actor on one worker and wait until it is there.

    The actor lives as long as the returned handle, its process, or a call of `release_actor`, whatever ends first.

    Args:
        worker: address of the worker (`workers_by_class`).
        name: for people and messages, e.g. ``engine-compute-0``.
        timeout_s: longest wait for the constructor, in seconds.

    Raises:
        InfrastructureFailure: there is no such worker, or it died under the constructor.
        DeadlineExceeded: the constructor did not end in time. What the constructor raises arrives as it is.
    """
    known = client.scheduler_info()["workers"]
    if worker not in known:
        raise InfrastructureFailure(f"actor {name}: no worker at {worker}; known: {sorted(known)}")
    future = client.submit(
        cls,
        *args,
        actor=True,
        key=f"{name}-{uuid4().hex}",
        workers=[worker],
        allow_other_workers=False,
        pure=False,
        **kwargs,
    )
    try:
        future.result(timeout=timeout_s)
    except DaskTimeoutError as error:
        if future.done():  # the constructor itself raised a TimeoutError
            raise
        future.cancel()
        raise DeadlineExceeded(
            f"actor {name} ({cls.__name__} on {worker}) was not built within {timeout_s:g} s"
        ) from error
    return ActorHandle(name, cls.__name__, str(future.key), worker, scheduler_address(client), owner=future)


def release_actor(handle: ActorHandle) -> None:
    """End an actor that this process started. Its worker drops the object; call a ``close`` method of it before."""
    if handle.owner is not None:
        handle.owner.release()


def restart_worker(client: Client, address: str, *, timeout_s: float = 30.0) -> None:
    """End a worker process with everything in it. Its nanny starts another one; a worker without a nanny is left to
    whoever started it. Returns when it is gone. Raises InfrastructureFailure when that takes too long."""
    assert client.scheduler is not None, client
    try:
        client.sync(
            client.scheduler.restart_workers,
            workers=[address],
            timeout=timeout_s,
            wait_for_workers=False,
            on_error="raise",
            stimulus_id=f"recovery-{uuid4().hex}",
            callback_timeout=timeout_s + 5.0,
        )
    except (DaskTimeoutError, TimeoutError, OSError) as error:
        raise InfrastructureFailure(f"worker {address} could not be restarted within {timeout_s:g} s") from error
