"""How do processes end, and how is that known?"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence

import psutil

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (Linux): none of them can slip away."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def restore_interrupt() -> None:
    """Let SIGINT end this process again. A shell's ``&`` makes its children ignore it, and theirs inherit that; Prefect
    turns the first SIGTERM of a worker into SIGINT, so such a worker would outlive one SIGTERM and go on taking runs.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """All living descendants of a process (this one by default)."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_all(first: Sequence[psutil.Process], *, grace_s: float) -> list[int]:
    """SIGTERM the processes ``first``, then SIGKILL whatever descendant of this process is left after ``grace_s``.

    Returns:
        The pids that had to be killed.
    """
    _send(first, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _alive() and time.monotonic() < deadline:
        reap()
        time.sleep(POLL_S)
    left = _alive()
    killed = [process.pid for process in left]
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        _send(left, signal.SIGKILL)
        time.sleep(POLL_S)
        reap()
        left = _alive()
    return killed


def reap() -> list[int]:
    """Collect ended children, adopted ones too, so that no zombie stays; returns their pids."""
    ended = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append(pid)


def _alive() -> list[psutil.Process]:
    return [process for process in descendants() if not is_gone(process.pid)]


def _send(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
