"""Through which Dask node does this process speak: its worker, or a client of its own?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from distributed import Client, Worker, get_worker
from distributed.core import ConnectionPool, Status

from resources.failures import InfrastructureFailure


@dataclass(frozen=True, slots=True)
class DaskLink:
    """The event loop and the connections that this process shares with everything else that speaks Dask in it."""

    loop: asyncio.AbstractEventLoop
    pool: ConnectionPool
    scheduler: Any
    """Pooled RPC to the scheduler: ``await link.scheduler.who_has(keys=[...])``, on ``loop`` only."""
    scheduler_address: str
    worker: Worker | None
    """Set when the process is a Dask worker."""


def find_link(scheduler_address: str | None = None) -> DaskLink:
    """The link of this process; one to ``scheduler_address`` is preferred when it speaks to several clusters.

    Works from any thread: a thread that a worker did not start carries no context variable that names the worker, so
    the process-wide set of nodes is consulted too.

    Raises:
        InfrastructureFailure: the process is no Dask worker and holds no running client.
    """
    links = _worker_links() or _client_links()
    for link in links:
        if link.scheduler_address == scheduler_address:
            return link
    if links:
        return links[0]
    raise InfrastructureFailure(
        "this process has no link to a Dask cluster: it is no Dask worker and holds no running distributed.Client; "
        "open a client first (resources.pools.cluster.attach)"
    )


def scheduler_address(client: Client) -> str:
    """Address of the scheduler that a running client speaks to."""
    assert client.scheduler is not None, client
    return str(client.scheduler.address)


def _worker_links() -> list[DaskLink]:
    try:
        workers = [get_worker()]
    except ValueError:
        workers = [worker for worker in Worker._instances if worker.status in (Status.running, Status.paused)]
    return [
        DaskLink(_asyncio_loop(worker), worker.rpc, worker.scheduler, worker.scheduler.address, worker)
        for worker in workers
    ]


def _client_links() -> list[DaskLink]:
    return [
        DaskLink(_asyncio_loop(client), client.rpc, client.scheduler, scheduler_address(client), None)
        for client in Client._instances
        if client.status == "running" and client.scheduler is not None
    ]


def _asyncio_loop(node: Worker | Client) -> asyncio.AbstractEventLoop:
    """Dask keeps tornado's wrapper; the wrapped asyncio loop is what other threads hand coroutines to."""
    return node.loop.asyncio_loop  # type: ignore[union-attr]
