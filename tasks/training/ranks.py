"""The learner's ranks: which one am I, and what do we tell each other?

A learner of one rank is the ordinary case and touches no torch.distributed. Several ranks form one process group (gloo
on a CPU, nccl on GPUs), which meets at a TCP store that the first rank hosts. Between ranks travel gradients (see
`sharding`), one scalar a step and a few objects an update; everything else each rank computes by itself from the batch.

| who waits          | for what                    | until, at the latest                                    |
|--------------------|-----------------------------|---------------------------------------------------------|
| a rank that joins  | all others at the TCP store | ``timeout_s``                                           |
| a collective       | the same one of all others  | ``timeout_s``; at once when another one's process ended |
"""

from __future__ import annotations

import gc
import hashlib
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from resources.failures import InfrastructureFailure
from tasks.training.row import TrainingRow


class Ranks(Protocol):
    """What the learner asks of its ranks. `sum` and `gather` are collective: every rank calls them, in one order."""

    rank: int
    size: int
    mesh: DeviceMesh | None
    """None for a single rank."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on all of them."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable object, in the order of ranks, on all of them."""
        ...

    def interrupt(self) -> None:
        """End the collective under way on this rank, from any thread. Not collective."""
        ...

    def leave(self) -> None:
        """End the group. Others that still wait in a collective leave it with an error."""
        ...


class OneRank:
    """A learner in one process."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def interrupt(self) -> None:
        return None

    def leave(self) -> None:
        return None


class Rendezvous:
    """The TCP store at which ranks meet. Lives in the first rank's process, on a free port."""

    def __init__(self, host: str, size: int, timeout_s: float) -> None:
        self.store = TCPStore(
            host, 0, size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        self.address = f"{host}:{self.store.port}"


class ProcessRanks:
    """One of several ranks, each in a process of its own. A process is in one group at a time, until `leave`; a group
    whose member is gone without having left (its actor was dropped, because the first rank's process or the run's
    driver died) makes room for the next one."""

    _member: ClassVar[weakref.ref[ProcessRanks] | None] = None
    """Of the group of this process: torch.distributed keeps it for the whole process, whoever it belonged to."""

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        *,
        device: str,
        timeout_s: float,
        store: TCPStore | None = None,
    ) -> None:
        """Blocks until all ranks are there.

        Args:
            address: ``host:port`` of the `Rendezvous`.
            timeout_s: longest wait for the others, here and in every collective, in seconds.
            store: the rendezvous' own store, on the rank that hosts it.

        Raises:
            InfrastructureFailure: not all ranks came in time, or this process already belongs to a group.
        """
        self.rank, self.size, self._device = rank, size, device
        self._lock = threading.Lock()
        self._left = False
        if dist.is_initialized() and not _drop_orphan(ProcessRanks._member):
            raise InfrastructureFailure(
                f"rank {rank}: this process already belongs to a group of {dist.get_world_size()} ranks; another run "
                "trains with several ranks on this worker: give the runs learner workers of their own"
            )
        if device.startswith("cuda:"):
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=timeout_s)
        host, _, port = address.rpartition(":")
        try:
            meeting = store or TCPStore(host, int(port), size, is_master=False, timeout=timeout)
            dist.init_process_group(
                "nccl" if device.startswith("cuda") else "gloo",
                store=PrefixStore("learner", meeting),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
        except (RuntimeError, ValueError) as error:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise InfrastructureFailure(
                f"rank {rank}: not all {size} learner ranks met at {address} within {timeout_s:g} s: {error}"
            ) from error
        ProcessRanks._member = weakref.ref(self)
        # torch keeps for good what it has worked out for a mesh, the place of this process in it included, and takes
        # meshes of one size and one name for the same one. A process may be another rank in its next group.
        name = f"rank_{rank}_of_{size}_at_{port}"
        self.mesh: DeviceMesh | None = init_device_mesh(device.partition(":")[0], (size,), mesh_dim_names=(name,))

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def interrupt(self) -> None:
        """nccl collectives end at once; gloo's end when the other's process does, or at their timeout."""
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is not None and self._device.startswith("cuda") and not self._left:
            group.abort()

    def leave(self) -> None:
        """May be called from any thread, and repeatedly."""
        with self._lock:
            if self._left:
                return
            self._left = True
        if dist.is_initialized():
            dist.destroy_process_group()


def _drop_orphan(member: weakref.ref[ProcessRanks] | None) -> bool:
    """End this process's group if nobody is left who could; whether it was done."""
    gc.collect()  # what an actor holds goes in cycles
    if member is None or member() is not None:
        return False
    group = dist.group.WORLD
    if group is not None and dist.get_backend() == "nccl":
        group.abort()  # its other ends are gone
    dist.destroy_process_group()
    return True


def check_same_batch(ranks: Ranks, rows: Sequence[TrainingRow], version: int) -> None:
    """A collective. Ranks that hold different batches would add up gradients of different losses.

    Raises ValueError, on every rank, when they do.
    """
    if ranks.size == 1:
        return
    digest = hashlib.sha256(repr([(row.trajectory_id, row.reward) for row in rows]).encode()).hexdigest()
    digests = ranks.gather(digest)
    if len(set(digests)) > 1:
        raise ValueError(f"update {version}: the learner's ranks read different batches (digests {digests})")
