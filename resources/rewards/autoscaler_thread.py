"""The autoscaler at work: a thread that looks every so often, survives failed launches and says what went wrong."""

from __future__ import annotations

import logging
import threading
from collections import deque

from resources.rewards.autoscaler import Autoscaler, ScalingSample

logger = logging.getLogger(__name__)

MAX_SAMPLES = 10_000
MAX_BACK_OFF_S = 30.0


class AutoscalerThread:
    """Runs `Autoscaler.tick` every ``period_s`` seconds in a daemon thread. Use as a context manager.

    A look that fails is logged and counted, and the next one waits twice as long, up to `MAX_BACK_OFF_S`.
    """

    def __init__(self, autoscaler: Autoscaler, period_s: float) -> None:
        self._autoscaler = autoscaler
        self._period_s = period_s
        self._stop = threading.Event()
        self._samples: deque[ScalingSample] = deque(maxlen=MAX_SAMPLES)
        self._thread: threading.Thread | None = None
        self._num_expired = 0
        self.num_failures = 0
        """Looks that failed, in all."""
        self.num_failures_in_a_row = 0
        self.last_error: str | None = None
        """What went wrong last, for the run's progress and its errors; None while all is well."""

    def start(self) -> AutoscalerThread:
        assert self._thread is None, "this autoscaler thread was started before"
        self._thread = threading.Thread(target=self._run, name="reward-autoscaler", daemon=True)
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 10.0) -> None:
        """No launch begins after this returns, unless one hangs for longer than the timeout (logged)."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=timeout_s)
            if self._thread.is_alive():
                logger.warning("the reward autoscaler is still in a launch %.0f s after it was told to stop", timeout_s)

    def __enter__(self) -> AutoscalerThread:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def num_replicas(self) -> int:
        """Replicas that were alive at the last look."""
        return self._samples[-1].num_running if self._samples else 0

    def history(self) -> list[ScalingSample]:
        """The latest looks, oldest first; runs of equal looks are kept as their first and last."""
        return list(self._samples)

    def look(self) -> None:
        """One look, with its failure kept as data (what the thread does every period)."""
        try:
            sample = self._autoscaler.tick()
        except Exception as error:  # the launcher is anybody's code; the run must not lose its autoscaler to it
            self.num_failures += 1
            self.num_failures_in_a_row += 1
            self.last_error = f"{type(error).__name__}: {error}"
            logger.exception("the reward autoscaler failed (%d in a row)", self.num_failures_in_a_row)
            return
        self.num_failures_in_a_row = 0
        self.last_error = self._expired_launches(sample)
        self._record(sample)

    def pause_s(self) -> float:
        """Seconds until the next look."""
        doublings = min(self.num_failures_in_a_row, 16)
        return min(self._period_s * 2**doublings, max(MAX_BACK_OFF_S, self._period_s))

    def _run(self) -> None:
        while True:
            self.look()
            if self._stop.wait(self.pause_s()):
                return

    def _expired_launches(self, sample: ScalingSample) -> str | None:
        """Launches that came to nothing stay the last error while work waits and no replica is there."""
        if self._autoscaler.num_expired > self._num_expired:
            self._num_expired = self._autoscaler.num_expired
            message = (
                f"{self._num_expired} reward replicas were asked for and did not register in time: "
                "look at their flow runs, and at the worker of the reward work pool (online? at its limit?)"
            )
            logger.warning(message)
            return message
        is_served = sample.num_running > 0 or sample.num_unclaimed == 0
        return None if is_served else self.last_error

    def _record(self, sample: ScalingSample) -> None:
        if len(self._samples) >= 2 and _same(self._samples[-1], sample) and _same(self._samples[-2], sample):
            self._samples[-1] = sample
        else:
            self._samples.append(sample)


def _same(one: ScalingSample, other: ScalingSample) -> bool:
    counts = ("num_running", "num_pending", "num_unclaimed", "num_in_flight", "num_launched")
    return all(getattr(one, name) == getattr(other, name) for name in counts)
