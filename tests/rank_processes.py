"""Learners of several ranks, each in a process of its own, doing what one learner would do."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tasks.training.config import TrainingConfig
from tasks.training.learner import Learner
from tasks.training.ranks import ProcessRanks, Rendezvous

TIMEOUT_S = 60.0
Work = Callable[[Callable[..., Learner], int], Any]
"""(builder of a learner of this rank, rank) -> what the rank answers."""


def on_ranks(size: int, directory: Path, *works: Work) -> list[list[Any]]:
    """Do each work on all ranks, one after the other in one process a rank; the answers, by work and rank.

    A rank that raises answers with its error, one that ends with None; later works are then not done.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(rank, size, str(directory), there, works), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        address = _receive(pipes[0])
        for pipe in pipes[1:]:
            pipe.send(address)
        return [[_receive(pipe) for pipe in pipes] for _ in works]
    finally:
        for process in processes:
            process.terminate()
            process.join(10)


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(120), "a rank gave no answer within 120 s"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None


def _serve(rank: int, size: int, directory: str, pipe: Connection, works: tuple[Work, ...]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    store = None
    if rank == 0:
        meeting = Rendezvous("127.0.0.1", size, TIMEOUT_S)
        store, address = meeting.store, meeting.address
        pipe.send(address)
    else:
        address = pipe.recv()
    ranks = ProcessRanks(rank, size, address, device="cpu", timeout_s=TIMEOUT_S, store=store)

    def make(seed: int = 0, **config: Any) -> Learner:
        return Learner(directory, TrainingConfig(**config), seed=seed, ranks=ranks)

    for work in works:
        try:
            answer = work(make, rank)
        except Exception as error:  # noqa: BLE001 - it is the answer
            traceback.print_exc()
            pipe.send_bytes(pickle.dumps(error))
            return
        # By value: torch shares tensors that go through ``send``, and they would be lost when this process ends.
        pipe.send_bytes(pickle.dumps(answer))
    ranks.leave()
