"""Which actors of the run have been lost with their worker?"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Iterable

from resources.failures import InfrastructureFailure
from resources.pools.actors import ActorHandle, actor_lives
from resources.pools.link import DaskLink, find_link

logger = logging.getLogger(__name__)


class LossWatch:
    """Asks the scheduler every ``poll_s`` seconds for the actors' hosts; each loss is told once.

    The scheduler notices the death of a worker process at once (its connection breaks), so a loss is known here within
    about ``poll_s``. A scheduler that stops to answer counts as the loss of every actor.

    Args:
        on_loss: called with the handle and the reason, on the Dask loop: it must not block.
    """

    def __init__(
        self,
        handles: Iterable[ActorHandle],
        on_loss: Callable[[ActorHandle, str], None] | None = None,
        *,
        poll_s: float = 1.0,
    ) -> None:
        self._watched = {handle.key: handle for handle in handles}
        self._on_loss = on_loss
        self._poll_s = poll_s
        self._watching: concurrent.futures.Future[None] | None = None
        self.lost: dict[str, str] = {}
        """Reasons by name of the actor."""

    def __enter__(self) -> LossWatch:
        schedulers = {handle.scheduler for handle in self._watched.values()}
        link = find_link(next(iter(schedulers), None))
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(link), link.loop)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def replace(self, old: ActorHandle, new: ActorHandle) -> None:
        """Watch ``new`` instead of ``old``: a supervisor has rebuilt the actor."""
        self._watched.pop(old.key, None)
        self._watched[new.key] = new
        self.lost.pop(old.name, None)

    def raise_if_lost(self) -> None:
        """Raises:
        InfrastructureFailure: names every lost actor and its worker.
        """
        if self.lost:
            raise InfrastructureFailure("; ".join(self.lost.values()))

    async def _watch(self, link: DaskLink) -> None:
        while True:
            for handle in list(self._watched.values()):
                try:
                    lost = None if await actor_lives(link, handle) else f"{handle} was lost: its worker is gone"
                except InfrastructureFailure as failure:
                    lost = f"{handle} was lost: {failure}"
                if lost is not None and self._watched.pop(handle.key, None) is not None:
                    self._tell(handle, lost)
            await asyncio.sleep(self._poll_s)

    def _tell(self, handle: ActorHandle, reason: str) -> None:
        logger.error(reason)
        self.lost[handle.name] = reason
        if self._on_loss is not None:
            self._on_loss(handle, reason)
