"""From a played episode to what the group queue hears: judged inline or sent to the pool, its row sealed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from resources.environments.family import FamilyConfig
from resources.failures import FailureClass, InfrastructureFailure, RewardFailure, RollartError
from resources.rewards.base import Score, ScoringRequest
from resources.rewards.checked import checked_score
from resources.rollout.env_manager import EnvManager
from resources.rollout.messages import Assignment, TrajectoryDone
from resources.trajectories.trajectory import Trajectory, TrajectoryRef


class RowWriter(Protocol):
    async def write(self, trajectory: Trajectory) -> TrajectoryRef: ...
    async def close(self) -> None: ...


class FamilyScorer(Protocol):
    """A scorer as resolved from a family's configuration (`resources.rewards.scorers.resolve_scorer`)."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def runs(self) -> str: ...
    def score(self, request: ScoringRequest) -> Score: ...


class ScoreSubmitter:
    """Scoring requests of one window share one micro-batch; submitting blocks, so it has a thread of its own."""

    def __init__(self, submit: Callable[[Sequence[ScoringRequest]], Any], window_s: float) -> None:
        self._submit, self._window_s = submit, window_s
        self._pending: list[tuple[ScoringRequest, asyncio.Future[None]]] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring-requests")

    async def submit(self, request: ScoringRequest) -> None:
        """Returns when the request is in the queue. Raises InfrastructureFailure when the queue refused it."""
        loop = asyncio.get_running_loop()
        submitted: asyncio.Future[None] = loop.create_future()
        self._pending.append((request, submitted))
        if len(self._pending) == 1:
            loop.call_later(self._window_s, self._send_soon)
        await submitted

    async def close(self) -> None:
        if self._pending:
            self._send_soon()
        await asyncio.gather(*self._sending)
        self._thread.shutdown(wait=False)

    def _send_soon(self) -> None:
        sending = asyncio.get_running_loop().create_task(self._send())
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _send(self) -> None:
        batch, self._pending = self._pending, []
        if not batch:
            return
        error: Exception | None = None
        try:
            requests = [request for request, _ in batch]
            await asyncio.get_running_loop().run_in_executor(self._thread, self._submit, requests)
        except (OSError, ValueError, RollartError) as caught:
            error = InfrastructureFailure(f"{len(batch)} scoring requests were not submitted: {caught}")
        for _, submitted in batch:
            if submitted.done():
                continue
            if error is None:
                submitted.set_result(None)
            else:
                submitted.set_exception(error)


@dataclass(frozen=True)
class Handover:
    """What one worker needs to hand its trajectories over."""

    families: Mapping[str, FamilyConfig]
    scorers: Mapping[str, FamilyScorer]
    """By family."""
    writer: RowWriter
    submitter: ScoreSubmitter

    async def deliver(self, manager: EnvManager, trajectory: Trajectory, duration_s: float) -> TrajectoryDone:
        """Judge, seal, submit; failures on the way become data of the trajectory."""
        scorer = self.scorers[trajectory.family]
        trajectory.scorer, trajectory.scorer_version = scorer.name, scorer.version
        awaits_score = trajectory.failure_class is None and scorer.runs == "pool"
        ref = None
        try:
            if trajectory.failure_class is None:
                await self._judge(scorer, manager, trajectory)
            if trajectory.failure_class is not FailureClass.CANCELLED or trajectory.turns:
                ref = await self.writer.write(trajectory)
            if awaits_score:
                await self.submitter.submit(self._request(scorer, manager, trajectory))
        except (RollartError, ValueError) as error:
            failure = error.failure_class if isinstance(error, RollartError) else FailureClass.INFRASTRUCTURE
            return describe(trajectory, manager, ref, duration_s, failure=failure, message=str(error))
        return describe(trajectory, manager, ref, duration_s, awaits_score=awaits_score)

    async def _judge(self, scorer: FamilyScorer, manager: EnvManager, trajectory: Trajectory) -> None:
        if scorer.runs == "pool":
            trajectory.reward = trajectory.success = None
            if manager.judgement is None:
                raise RewardFailure(
                    f"scorer {scorer.name!r} of family {trajectory.family!r} runs on the pool, but environment "
                    f"{trajectory.env_id!r} gives no judgement to score; set scorer to 'environment', or add "
                    "judgement()"
                )
            return
        if scorer.name == "environment":
            return  # the environment's own outcome is the reward
        deadline_s = self.families[trajectory.family].score_deadline_s
        request = self._request(scorer, manager, trajectory)
        try:
            async with asyncio.timeout(deadline_s):
                score = checked_score(await asyncio.to_thread(scorer.score, request), request)
        except TimeoutError:
            raise RewardFailure(f"scorer {scorer.name!r} did not judge within {deadline_s:g} s") from None
        except Exception as error:
            raise RewardFailure(f"scorer {scorer.name!r} raised {type(error).__name__}: {error}") from error
        if score.reward is None:
            raise RewardFailure(f"scorer {scorer.name!r}: {score.failure_message or 'gave no reward'}")
        trajectory.reward, trajectory.success = score.reward, score.success
        trajectory.reward_components = score.components

    def _request(self, scorer: FamilyScorer, manager: EnvManager, trajectory: Trajectory) -> ScoringRequest:
        payload = manager.judgement
        if payload is None:
            payload = {
                "reward": manager.reward_so_far,
                "success": trajectory.success,
                "components": trajectory.reward_components,
            }
        return ScoringRequest(
            trajectory_id=trajectory.trajectory_id,
            family=trajectory.family,
            scorer=scorer.name,
            scorer_version=scorer.version,
            payload=payload,
            deadline_s=self.families[trajectory.family].score_deadline_s,
        )


def describe(
    trajectory: Trajectory,
    manager: EnvManager,
    ref: TrajectoryRef | None,
    duration_s: float,
    *,
    awaits_score: bool = False,
    failure: FailureClass | None = None,
    message: str = "",
) -> TrajectoryDone:
    """The few facts of a trajectory that the group queue keeps. A cancelled one tells its reward so far."""
    failure = failure or trajectory.failure_class
    reward = trajectory.reward if failure is None or failure.is_scored else None
    return TrajectoryDone(
        trajectory_id=trajectory.trajectory_id,
        family=trajectory.family,
        group_id=trajectory.group_id,
        member=trajectory.member,
        attempt=trajectory.attempt,
        ref=ref,
        reward=manager.reward_so_far if failure is FailureClass.CANCELLED else reward,
        awaits_score=awaits_score,
        success=trajectory.success,
        failure=failure,
        failure_message=message or trajectory.failure_message,
        termination=trajectory.termination,
        oldest_version=trajectory.oldest_version,
        newest_version=trajectory.newest_version,
        num_sampled_tokens=trajectory.num_sampled_tokens,
        num_tokens=len(trajectory.token_ids),
        num_turns=len(trajectory.turns),
        num_invalid_actions=sum(turn.invalid_action for turn in trajectory.turns),
        truncated=trajectory.truncated,
        duration_s=duration_s,
        scorer=trajectory.scorer,
        scorer_version=trajectory.scorer_version,
        policies=manager.policy_counts,
    )


def never_played(
    assignment: Assignment, message: str, failure: FailureClass = FailureClass.INFRASTRUCTURE
) -> TrajectoryDone:
    """The report of an assignment that broke down outside of its episode."""
    return TrajectoryDone(
        trajectory_id=assignment.trajectory_id,
        family=assignment.family,
        group_id=assignment.group_id,
        member=assignment.member,
        attempt=assignment.attempt,
        ref=None,
        reward=None,
        awaits_score=False,
        success=None,
        failure=failure,
        failure_message=message,
        termination="preempted",
        oldest_version=None,
        newest_version=None,
        num_sampled_tokens=0,
        num_tokens=0,
        num_turns=0,
        num_invalid_actions=0,
        truncated=False,
        duration_s=0.0,
    )
