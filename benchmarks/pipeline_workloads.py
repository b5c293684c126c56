"""The work of the pipeline benchmark, and what physics allows: environments that wait, a learner that takes T seconds.

Times are 1/100 of the ones they stand for: a step of 0.35 s is one of 35 s. R is the time in which a batch is generated
(its slowest trajectory), different for each; T is the time of an update.

| pipeline            | seconds an iteration takes on average, at least |
|---------------------|-------------------------------------------------|
| synchronous         | mean R + T                                      |
| one_off             | mean of max(R, T)                               |
| asynchronous, alpha | max(T, (mean R + T) / (alpha + 1))              |

The last one: a batch's worth of groups starts when version v is published, and batch v + alpha is the last one that may
train on them, so alpha + 1 iterations take at least their R and the update after it. That is less than max(R, T), since
waves of rollouts overlap. It holds as long as nothing is discarded: a batch that does not wait for a slow group, which
then becomes too old (``evicted_groups``), may be a little earlier.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from resources.environments.base import Message, StepOutcome

ENVIRONMENT = "benchmarks.pipeline_workloads:WaitingEnvironment"


@dataclass(frozen=True)
class Workload:
    """``training_share``: T as a share of the R that was measured."""

    name: str
    step_s: float
    """Mean latency of one environment step, in seconds."""
    sigma: float
    """Standard deviation of the logarithm of the latencies (lognormal); the mean stays."""
    training_share: float


WORKLOADS = (
    Workload("balanced", step_s=0.35, sigma=0.1, training_share=1.0),
    Workload("rollout-heavy", step_s=0.35, sigma=0.1, training_share=1 / 3),
    Workload("long tails", step_s=0.15, sigma=1.0, training_share=1 / 2),
)


@dataclass(frozen=True)
class Pipeline:
    pipeline: str
    max_staleness: int

    @property
    def name(self) -> str:
        return f"asynchronous, alpha {self.max_staleness}" if self.pipeline == "asynchronous" else self.pipeline

    def bound_s(self, rollouts_s: Sequence[float], training_s: float) -> float:
        """Seconds of an iteration at least, given R of each batch; see the module."""
        match self.pipeline:
            case "synchronous":
                return mean(rollouts_s) + training_s
            case "one_off":
                return mean(max(rollout_s, training_s) for rollout_s in rollouts_s)
            case _:
                return max(training_s, (mean(rollouts_s) + training_s) / (self.max_staleness + 1))


PIPELINES = (
    Pipeline("synchronous", 0),
    Pipeline("one_off", 1),
    Pipeline("asynchronous", 1),
    Pipeline("asynchronous", 2),
    Pipeline("asynchronous", 4),
)


class WaitingEnvironment:
    """An episode of ``num_turns`` steps, each of which takes its time; what is said does not matter.

    Latencies come from the episode's seed and a counter of the episodes that share it, so every pipeline gets the same.
    """

    env_version = "1"
    _episodes: dict[int, int] = {}  # noqa: RUF012 - the siblings of a group, in this process

    def __init__(self, step_s: float, sigma: float, num_turns: int = 5) -> None:
        self.max_turns = num_turns
        self._step_s, self._sigma = step_s, sigma

    @classmethod
    def begin_run(cls) -> None:
        """Forget who has played: the next run draws the same latencies again."""
        cls._episodes.clear()

    async def reset(self, seed: int) -> list[Message]:
        sibling = self._episodes[seed] = self._episodes.get(seed, -1) + 1
        self._random = random.Random(f"{seed} {sibling}")
        self._turns = 0
        return [Message(role="user", content="go")]

    async def step(self, action: str) -> StepOutcome:
        await asyncio.sleep(self.next_latency_s())
        self._turns += 1
        if self._turns == self.max_turns:
            success = self._random.random() < 0.5
            return StepOutcome([], reward=float(success), terminated=True, success=success)
        return StepOutcome([Message(role="user", content="on")])

    def next_latency_s(self) -> float:
        # A lognormal of this mu has mean 1.
        return self._step_s * self._random.lognormvariate(-(self._sigma**2) / 2, self._sigma)

    async def close(self) -> None: ...

    def judgement(self) -> None:
        return None
