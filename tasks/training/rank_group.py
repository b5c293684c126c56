"""The learner's ranks as one: the first rank builds the others, does with them what it is asked, and builds them anew.

The first rank lives in the actor that stages call (`owner`); each further one is an actor on another worker of the
learner class. All are built together and go together: a rank that dies takes the group with it, because nobody else
holds its shards. The next call then builds a new group, on the workers there are, from the last checkpoint. The worker
of a rank that gave no answer is restarted before that.

| who waits      | for what                                | until, at the latest                                      |
|----------------|-----------------------------------------|-----------------------------------------------------------|
| a build        | the worker of a rank that died          | 45 s, and the collectives' timeout; then with fewer ranks |
| a build        | all ranks to meet                       | ``training.collective_timeout_s``                         |
| the first rank | its own part of the work                | the collectives' timeout after another rank has left      |
| the first rank | the others' parts when its own is done  | ``training.collective_timeout_s``                         |
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from distributed import get_client, get_worker

from resources.failures import InfrastructureFailure, RollartError
from resources.pools.actors import ActorHandle, call, call_sync
from resources.pools.link import find_link
from resources.pools.placement import release_actor, restart_worker, start_actor, workers_by_class
from tasks.training.rank import LearnerRank, LearnerSettings

logger = logging.getLogger(__name__)
LEAVE_S = 5.0
"""Longest wait for a rank to drop its weights; a rank that hangs is released all the same."""
REPLACEMENT_S = 45.0
"""Longest wait for the worker of a rank that died. A learner that is built again has ``recovery.build_timeout_s``
(120 s) for it and for all else."""
LOOK_S = 0.5
"""How often workers are looked for."""


class RankActor:
    """A rank beside the first. Its constructor returns when all ranks have met and hold the weights."""

    def __init__(self, settings: LearnerSettings, rank: int, size: int, address: str, version: int | None) -> None:
        from tasks.training.ranks import ProcessRanks

        self._ranks = ProcessRanks(
            rank, size, address, device=settings.device, timeout_s=settings.training.collective_timeout_s
        )
        try:
            self._rank: LearnerRank | None = LearnerRank(settings, self._ranks, version)
        except BaseException:
            self._ranks.leave()
            raise

    def work(self, method: str, *arguments: Any) -> None:
        """This rank's part of what all of them do."""
        assert self._rank is not None, "the rank has left"
        try:
            getattr(self._rank, method)(*arguments)
        except BaseException:
            self._ranks.leave()
            raise

    async def interrupt(self) -> None:
        """End a collective that another rank has left. On the worker's loop, while `work` waits in its thread."""
        self._ranks.interrupt()

    def leave(self) -> None:
        """Drop the weights and the group."""
        self._rank = None
        self._ranks.leave()
        gc.collect()


class RankGroup:
    """Lives in the first rank's actor; one thread at a time."""

    def __init__(self, settings: LearnerSettings, hardware_class: str | None, num_ranks: int | None = None) -> None:
        """
        Args:
            hardware_class: whose workers the ranks live on; None: one rank, in this process.
            num_ranks: of a group that was lost with its first rank, and whose place this one takes; None: there was
                none.
        """
        self._settings = settings
        self._config = settings.training
        self._class = hardware_class
        self.first: LearnerRank | None = None
        """The rank of this process; None while there is no group."""
        self._others: list[ActorHandle] = []
        self._silent: set[str] = set()
        """Workers whose rank gave no answer in time."""
        self._ranks: Any = None
        self._size = num_ranks
        """Of the run's first group; None: this is it."""
        self.broken: str | None = None
        """Why the group has to be built anew; None while it works."""

    def build(self, version: int | None) -> None:
        """All ranks, from a checkpoint or from the start. A group that is there already is taken down first.

        Raises:
            ValueError: ``training.ranks`` is more than there are workers.
            InfrastructureFailure: the ranks did not meet.
        """
        self.close()
        workers = self._workers()
        if len(workers) == 1:
            self.first = LearnerRank(self._settings, None, version)
        else:
            self._meet(workers, version)
        self._size = self._size or len(workers)
        self.broken = None

    def together(self, method: str, *arguments: Any) -> Any:
        """The first rank's answer, when every rank has done its part.

        Raises:
            InfrastructureFailure: a rank was lost or left; names it. The group is then broken. What every rank finds
                wrong (a bad row, a loss that is NaN) arrives as it is.
        """
        assert self.first is not None and self.broken is None, self.broken
        own = getattr(self.first, method)
        if not self._others:
            return own(*arguments)
        link = find_link(self._others[0].scheduler)
        parts = {
            rank: asyncio.run_coroutine_threadsafe(call(handle, "work", method, *arguments), link.loop)
            for rank, handle in enumerate(self._others, start=1)
        }
        for part in parts.values():
            part.add_done_callback(self._interrupt_if_failed)
        failures: dict[int, BaseException] = {}
        answer = None
        try:
            answer = own(*arguments)
        except Exception as error:  # noqa: BLE001 - whose fault it is, the other ranks' answers tell
            failures[0] = error
            for handle in self._others:
                asyncio.run_coroutine_threadsafe(_quietly_interrupt(handle), link.loop)
        deadline = time.monotonic() + self._config.collective_timeout_s
        for rank, part in parts.items():
            try:
                part.result(max(0.0, deadline - time.monotonic()))
            except concurrent.futures.TimeoutError:
                self._silent.add(self._others[rank - 1].worker)
                failures[rank] = InfrastructureFailure(f"no answer within {self._config.collective_timeout_s:g} s")
            except Exception as error:  # noqa: BLE001 - as above
                failures[rank] = error
        if failures:
            self.broken = f"{method} failed on learner rank(s) {sorted(failures)}"
            raise self._cause(method, failures)
        return answer

    def close(self) -> None:
        """End the group; every rank drops its weights."""
        others, self._others = self._others, []
        self.first = None
        if self._ranks is not None:
            self._ranks.leave()
            self._ranks = None
        gc.collect()
        for handle in others:
            if handle.worker in self._silent:
                # Its thread hangs in the work that it was given: only a new process can hold a rank again.
                with suppress(RollartError, OSError):
                    restart_worker(get_client(), handle.worker)
            else:
                with suppress(RollartError, OSError):
                    call_sync(handle, "leave", timeout_s=LEAVE_S)
            release_actor(handle)
        self._silent.clear()

    # ----------------------------------------------------------------------------------------------------------------

    def _workers(self) -> list[str | None]:
        """Workers of the ranks, this process's own first."""
        if self._class is None or self._config.backend == "simulated":
            return [None]
        own = get_worker().address
        deadline = time.monotonic() + min(REPLACEMENT_S, self._config.collective_timeout_s)
        while True:
            known = workers_by_class(get_client()).get(self._class, [])
            others = [address for address in known if address != own]
            size = self._size or self._config.ranks or 1 + len(others)
            if 1 + len(others) >= size:
                return [own, *others[: size - 1]]
            if not self._size:
                raise ValueError(
                    f"training.ranks is {self._config.ranks}, but {1 + len(others)} workers carry the class "
                    f"{self._class!r}; raise pools.classes.{self._class}.num_workers, or lower training.ranks"
                )
            if time.monotonic() >= deadline:
                logger.warning("%d of %d learner workers are left; going on with them", 1 + len(others), size)
                return [own, *others]
            time.sleep(LOOK_S)

    def _meet(self, workers: list[str | None], version: int | None) -> None:
        from tasks.training.ranks import ProcessRanks, Rendezvous

        own, *others = workers
        assert own is not None
        size, timeout_s = len(workers), self._config.collective_timeout_s
        client = get_client()
        meeting = Rendezvous(_host(own), size, timeout_s)

        def start(rank: int, worker: str) -> ActorHandle:
            return start_actor(
                client,
                RankActor,
                self._settings,
                rank,
                size,
                meeting.address,
                version,
                worker=worker,
                name=f"learner-rank-{rank}",
                timeout_s=2 * timeout_s,
            )

        with ThreadPoolExecutor(size, thread_name_prefix="rank-start") as threads:
            starting = [threads.submit(start, rank, str(worker)) for rank, worker in enumerate(others, start=1)]
            try:
                self._ranks = ProcessRanks(
                    0, size, meeting.address, device=self._settings.device, timeout_s=timeout_s, store=meeting.store
                )
                self.first = LearnerRank(self._settings, self._ranks, version)
                self._others = [each.result() for each in starting]
            except BaseException as error:
                if self._ranks is not None:
                    self._ranks.leave()
                    self._ranks = None
                failures = [failure for each in starting if (failure := each.exception()) is not None]
                self._others = [each.result() for each in starting if each.exception() is None]
                self.close()
                if _is_of_a_collective(error) or isinstance(error, InfrastructureFailure):
                    # Nobody came, or somebody went: that one knows why.
                    for failure in failures:
                        if not _is_of_a_collective(failure):
                            raise failure from error
                raise

    def _interrupt_if_failed(self, part: concurrent.futures.Future[Any]) -> None:
        if not part.cancelled() and part.exception() is not None and self._ranks is not None:
            self._ranks.interrupt()

    def _cause(self, method: str, failures: dict[int, BaseException]) -> BaseException:
        """The failure that the others follow from."""
        lost = {rank: e for rank, e in failures.items() if isinstance(e, InfrastructureFailure)}
        raised = {rank: e for rank, e in failures.items() if not _is_of_a_collective(e)}
        if 0 in raised and not lost:
            return raised[0]
        rank, error = next(iter((lost or raised or failures).items()))
        where = "this one" if rank == 0 else str(self._others[rank - 1])
        failure = InfrastructureFailure(
            f"learner rank {rank} of {1 + len(self._others)} ({where}) failed during {method}: "
            f"{type(error).__name__}: {error}. The group is built again from the last checkpoint"
        )
        failure.__cause__ = error
        return failure


async def _quietly_interrupt(handle: ActorHandle) -> None:
    with suppress(RollartError, OSError):
        await call(handle, "interrupt")


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether a collective raised it: a follow-up of another rank's failure."""
    import torch.distributed as dist

    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _host(address: str) -> str:
    return address.rpartition("://")[2].rpartition(":")[0]
