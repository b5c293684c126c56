"""Each variant of `benchmarks.training` in processes of its own, which take turns: memory is then one variant's alone,
and whatever else the machine does hits all alike. Linux only: peaks are read from /proc.

| who waits  | for what                               | until, at the latest        |
|------------|----------------------------------------|-----------------------------|
| the parent | a child's answer to what it was asked  | `ANSWER_TIMEOUT_S`          |
| a child    | what to do next                        | the parent closes its pipe  |
| a rank     | the other one                          | `COLLECTIVE_TIMEOUT_S`      |
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from benchmarks.training_rows import Workload
from benchmarks.training_variants import UpdateResult, Variant

ANSWER_TIMEOUT_S = 600.0
COLLECTIVE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class TimedUpdate:
    result: UpdateResult
    wall_s: float
    """From the call to the last rank's answer."""
    cpu_s: float
    """Of all ranks."""


class VariantProcesses:
    """One process a rank. Use as a context manager; every rank has its model when it is entered."""

    def __init__(self, variant: Variant, workload: Workload, num_ranks: int = 1) -> None:
        self.variant, self.num_ranks = variant, num_ranks
        self._workload = workload
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(self.num_ranks):
                here, there = context.Pipe()
                arguments = (self.variant, self._workload, rank, self.num_ranks, there)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
            if self.num_ranks > 1:
                address = self._receive(self._pipes[0])
                for pipe in self._pipes[1:]:
                    pipe.send(address)
            for pipe in self._pipes:
                self._receive(pipe)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def update(self, version: int) -> TimedUpdate:
        started = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(version)
        answers = [self._receive(pipe) for pipe in self._pipes]
        wall_s = time.perf_counter() - started
        return TimedUpdate(answers[0][0], wall_s, sum(cpu_s for _, cpu_s in answers))

    def peak_bytes(self) -> int:
        """Largest resident memory during updates, less what was resident before the first one; of the rank with most.
        So it holds activations, gradients and the optimizer's moments, not weights and libraries."""
        for pipe in self._pipes:
            pipe.send("peak")
        return max(self._receive(pipe) for pipe in self._pipes)

    def _receive(self, pipe: Connection) -> Any:
        if not pipe.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"{self.variant.name}: no answer of a process within {ANSWER_TIMEOUT_S:g} s")
        try:
            answer = pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.variant.name}: a process ended early; its error stands above") from None
        return answer


def _serve(variant: Variant, workload: Workload, rank: int, num_ranks: int, pipe: Connection) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    ranks = _join(rank, num_ranks, pipe) if num_ranks > 1 else None
    update = variant.build(workload, ranks)
    _reset_peak()
    before = _status_bytes("VmRSS")
    pipe.send("ready")
    while True:
        try:
            wanted = pipe.recv()
        except EOFError:
            break
        if wanted == "peak":
            pipe.send(max(0, _status_bytes("VmHWM") - before))
            continue
        cpu_started = time.process_time()
        result = update(wanted)
        pipe.send((result, time.process_time() - cpu_started))
    if ranks is not None:
        ranks.leave()


def _join(rank: int, num_ranks: int, pipe: Connection) -> Any:
    from tasks.training.ranks import ProcessRanks, Rendezvous

    store = None
    if rank == 0:
        meeting = Rendezvous("127.0.0.1", num_ranks, COLLECTIVE_TIMEOUT_S)
        store, address = meeting.store, meeting.address
        pipe.send(address)
    else:
        address = pipe.recv()
    return ProcessRanks(rank, num_ranks, address, device="cpu", timeout_s=COLLECTIVE_TIMEOUT_S, store=store)


def _reset_peak() -> None:
    """Let the kernel forget the peak of imports and loading. Where it refuses, `peak_bytes` may be too large."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status_bytes(name: str) -> int:
    """A field of /proc/self/status that is counted in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; memory is measured on Linux only")
