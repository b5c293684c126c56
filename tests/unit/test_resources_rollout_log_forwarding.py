"""What the group queue says while somebody waits for it."""

from __future__ import annotations

import threading

from resources.failures import InfrastructureFailure
from resources.rollout.log_forwarding import NUM_LINES, forwarded_log


class TalkingQueue:
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    async def take_log(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


class LostQueue:
    async def take_log(self) -> list[str]:
        raise InfrastructureFailure("its worker is gone")


def test_lines_are_told_while_the_wait_lasts_and_at_its_end() -> None:
    queue, said, first = TalkingQueue(["the lake is dry"]), [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        first.set()

    with forwarded_log(queue, say, period_s=0.01):
        assert first.wait(10), "told before the wait is over"
        queue.lines = ["and it stays dry"]
    assert said == ["the lake is dry", "and it stays dry"]


def test_an_outage_does_not_flood_the_log() -> None:
    said: list[str] = []
    with forwarded_log(TalkingQueue([f"failure {number}" for number in range(NUM_LINES + 5)]), said.append):
        pass
    assert len(said) == NUM_LINES + 1 and said[-1] == "... and 5 more lines like these"


def test_a_lost_queue_is_told_by_whoever_waits_for_it() -> None:
    said: list[str] = []
    with forwarded_log(LostQueue(), said.append):
        pass
    assert said == []
