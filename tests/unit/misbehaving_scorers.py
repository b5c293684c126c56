"""Scorers that do what scorers should not do, for the tests of the reward pool. Imported by scorer processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from resources.rewards.base import Score, ScoringRequest


class _PoolScorer:
    name = "test"
    version = "1"
    runs = "pool"


def answer(request: ScoringRequest, reward: float, **fields) -> Score:
    return Score(request.trajectory_id, request.scorer, request.scorer_version, reward, **fields)


class EchoScorer(_PoolScorer):
    """The payload's reward; prints, as scorers do."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def score(self, request: ScoringRequest) -> Score:
        print("a scorer's chatter on stdout")
        return answer(request, self.factor * request.payload["reward"], components={"pid": os.getpid()})


class LoopingScorer(_PoolScorer):
    """Never returns."""

    def score(self, request: ScoringRequest) -> Score:
        while True:
            pass


class LockHoldingScorer(_PoolScorer):
    """Never returns, inside one C call that holds the interpreter's lock."""

    def score(self, request: ScoringRequest) -> Score:
        re.match(r"(a+)+$", "a" * 60 + "b")
        raise AssertionError("unreachable")


class ForkingScorer(_PoolScorer):
    """Starts a child that writes its pid to the payload's file, and never returns."""

    def score(self, request: ScoringRequest) -> Score:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(request.payload["file"]).write_text(str(child.pid))
        time.sleep(60)
        raise AssertionError("unreachable")


class RaisingScorer(_PoolScorer):
    def score(self, request: ScoringRequest) -> Score:
        raise KeyError("no such answer")


class ExitingScorer(_PoolScorer):
    """Ends its process without a word."""

    def score(self, request: ScoringRequest) -> Score:
        os._exit(7)


class NotANumberScorer(_PoolScorer):
    def score(self, request: ScoringRequest) -> Score:
        return answer(request, float("nan"))


class WrongTrajectoryScorer(_PoolScorer):
    def score(self, request: ScoringRequest) -> Score:
        return Score("another", request.scorer, request.scorer_version, 1.0)


class AlarmScorer(_PoolScorer):
    """Guards itself with an alarm signal, which only works in a main thread (as math-verify does)."""

    def score(self, request: ScoringRequest) -> Score:
        assert threading.current_thread() is threading.main_thread()

        def on_alarm(number, frame):
            raise TimeoutError

        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            time.sleep(30)
        except TimeoutError:
            return answer(request, 0.5)
        raise AssertionError("the alarm did not ring")


class SlowSumScorer(_PoolScorer):
    """Takes the payload's seconds; a reward that depends on the trajectory."""

    def score(self, request: ScoringRequest) -> Score:
        time.sleep(request.payload["seconds"])
        return answer(request, float(request.payload["reward"]))
