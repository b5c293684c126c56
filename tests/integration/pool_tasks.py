"""Prefect tasks that the task-runner tests send to pools. A module of its own: workers import it."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

from distributed import get_worker
from prefect import task


@task(tags={"pool:compute"})
def where_compute() -> str:
    return str(get_worker().name)


@task(tags={"pool:learner"})
def where_learner() -> str:
    return str(get_worker().name)


@task(tags={"pool:bandwidth"})
def where_bandwidth() -> str:
    return str(get_worker().name)


@task(tags={"pool:nobody"})
def where_nobody() -> str:
    return "unreachable"


@task
def untagged() -> None:
    return None


@task(tags={"pool:compute", "pool:learner"})
def tagged_twice() -> None:
    return None


@task(tags={"pool:compute"})
def double(value: int, nothing: object = None) -> int:
    return 2 * value


@task(tags={"pool:learner"})
async def double_later(value: int) -> int:
    return 2 * value


@task(tags={"pool:learner"})
def fail(value: int = 0) -> int:
    raise ValueError("no such value")


@task(tags={"pool:learner"}, retries=2, retry_delay_seconds=0)
def fail_twice(marks: str) -> int:
    """Succeeds at the third attempt; each attempt leaves a mark."""
    folder = Path(marks)
    count = len(list(folder.iterdir()))
    (folder / str(count)).touch()
    if count < 2:
        raise ValueError(f"attempt {count}")
    return count


@task(tags={"pool:learner"})
def mark_after(folder: str, delay_s: float) -> float:
    time.sleep(delay_s)
    Path(folder, "marked").touch()
    return time.time()


@task(tags={"pool:compute"})
def is_marked(folder: str) -> bool:
    return Path(folder, "marked").exists()


@task(tags={"pool:learner"})
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@task(tags={"pool:compute"})
def log_line(text: str) -> None:
    logging.getLogger("tasks.example").warning(text)
