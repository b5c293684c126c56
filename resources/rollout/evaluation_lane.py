"""Evaluation episodes: a lane of their own, outside admission, staleness and the batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from resources.failures import FailureClass
from resources.rewards.base import Score
from resources.rollout.messages import Assignment, BatchGroup, BatchMember, TrajectoryDone


@dataclass(slots=True)
class Episode:
    family: str
    index: int
    group_id: str
    seed_env: int
    attempt: int = 0
    awaits_score: bool = False
    done: TrajectoryDone | None = None
    result: BatchGroup | None = None
    """Set when the episode is settled; unscored for good: its member has no reward (and is missing without a row)."""


@dataclass(slots=True)
class Evaluation:
    run_id: str
    greedy: bool
    seed: int
    episodes: list[Episode] = field(default_factory=list)

    def id_of(self, episode: Episode) -> str:
        """Trajectory id of the attempt in progress."""
        return f"{self.run_id}/{episode.group_id}/0/{episode.attempt}"

    def missing(self) -> list[Episode]:
        return [episode for episode in self.episodes if episode.result is None]

    def results(self) -> list[BatchGroup]:
        return [episode.result for episode in self.episodes if episode.result is not None]


class EvaluationLane:
    """All evaluations in progress. Failed episodes are played again up to ``max_retries`` times, then left unscored."""

    def __init__(
        self,
        run_id: str,
        lane_id: str,
        *,
        max_retries: int,
        episode_seed: Callable[[int, str, int], int],
        sampling_seed: Callable[[int, str, int], int],
    ) -> None:
        """``lane_id`` keeps the ids of two services of one run apart; seeds do not depend on it.

        ``episode_seed(seed, family, index)``; ``sampling_seed(seed, name, attempt)``.
        """
        self._run_id, self._lane_id, self._max_retries = run_id, lane_id, max_retries
        self._episode_seed, self._sampling_seed = episode_seed, sampling_seed
        self._num_opened = 0
        self._waited_for: dict[str, tuple[Evaluation, Episode]] = {}

    def open(self, episodes: Mapping[str, int], seed: int, greedy: bool) -> tuple[Evaluation, list[Assignment]]:
        evaluation = Evaluation(self._run_id, greedy, seed)
        self._num_opened += 1
        for family, number in episodes.items():
            for index in range(number):
                group_id = f"eval-{self._lane_id}-{self._num_opened:03d}-{family}-{index:05d}"
                seed_env = self._episode_seed(seed, family, index)
                evaluation.episodes.append(Episode(family, index, group_id, seed_env))
        return evaluation, [self._assign(evaluation, episode) for episode in evaluation.episodes]

    def abandon(self, evaluation: Evaluation) -> list[str]:
        """Forget an evaluation that nobody waits for any more; returns the trajectories that may still run."""
        ids = [key for key, (of, _) in self._waited_for.items() if of is evaluation]
        for key in ids:
            del self._waited_for[key]
        return ids

    def owns(self, trajectory_id: str) -> bool:
        return trajectory_id in self._waited_for

    def awaits_score(self, trajectory_id: str) -> bool:
        return trajectory_id in self._waited_for and self._waited_for[trajectory_id][1].awaits_score

    def done(self, done: TrajectoryDone) -> Assignment | None:
        """Book the end of an episode; returns the assignment that plays it again, if it failed."""
        _, episode = self._waited_for[done.trajectory_id]
        if episode.awaits_score:
            return None  # reported twice
        episode.done = done
        if done.failure is not None and not done.failure.is_scored:
            return self.failed(done.trajectory_id, done.failure)
        episode.awaits_score = done.awaits_score
        if not done.awaits_score:
            self._settle(done.trajectory_id, done.reward, done.success, done.scorer_version)
        return None

    def scored(self, score: Score) -> Assignment | None:
        if score.failure is not None or score.reward is None:
            return self.failed(score.trajectory_id, FailureClass.REWARD)
        self._settle(score.trajectory_id, score.reward, score.success, score.scorer_version)
        return None

    def failed(self, trajectory_id: str, failure: FailureClass = FailureClass.INFRASTRUCTURE) -> Assignment | None:
        evaluation, episode = self._waited_for[trajectory_id]
        if episode.awaits_score and failure is not FailureClass.REWARD:
            return None  # its row is sealed: the worker is no longer needed
        del self._waited_for[trajectory_id]
        if episode.attempt >= self._max_retries:
            episode.result = BatchGroup(episode.group_id, episode.family, episode.seed_env, _unscored(episode.done))
            return None
        episode.attempt += 1
        episode.awaits_score, episode.done = False, None
        return self._assign(evaluation, episode)

    def _assign(self, evaluation: Evaluation, episode: Episode) -> Assignment:
        assignment = Assignment(
            run_id=self._run_id,
            family=episode.family,
            group_id=episode.group_id,
            member=0,
            attempt=episode.attempt,
            group_size=1,
            seed_env=episode.seed_env,
            seed_sampling=self._sampling_seed(
                evaluation.seed, f"eval-{episode.family}-{episode.index}", episode.attempt
            ),
            split="eval",
            greedy=evaluation.greedy,
        )
        self._waited_for[assignment.trajectory_id] = (evaluation, episode)
        return assignment

    def _settle(self, trajectory_id: str, reward: float | None, success: bool | None, scorer_version: str) -> None:
        _, episode = self._waited_for.pop(trajectory_id)
        done = episode.done
        assert done is not None and done.ref is not None and reward is not None, (trajectory_id, done)
        member = BatchMember(trajectory_id, done.ref, reward, success, done.scorer, scorer_version, done.oldest_version)
        episode.result = BatchGroup(episode.group_id, episode.family, episode.seed_env, (member,))


def _unscored(done: TrajectoryDone | None) -> tuple[BatchMember, ...]:
    if done is None or done.ref is None:
        return ()
    return (
        BatchMember(done.trajectory_id, done.ref, None, None, done.scorer, done.scorer_version, done.oldest_version),
    )
