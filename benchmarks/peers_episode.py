"""One episode as every side of `benchmarks.peers` plays it: the project's own environment and its own judgement."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

from resources.environments.base import Environment, Message
from resources.environments.family import FamilyConfig
from resources.environments.registry import make_environment
from resources.rewards.base import ScoringRequest
from resources.rewards.scorers import ResolvedScorer, resolve_scorer


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an episode came to."""

    family: str
    reward: float
    success: bool
    num_turns: int
    num_sampled_tokens: int
    components: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward."""


class Episode:
    """Plays one environment. ``act`` until ``over``, then ``outcome`` (scored in this process, without a pool)."""

    def __init__(self, name: str, family: FamilyConfig, scorer: ResolvedScorer | None = None) -> None:
        self.name = name
        self.family = family
        self.over = False
        self._scorer = scorer or resolve_scorer(family.scorer, family.scorer_arguments)
        self._environment: Environment | None = None
        self.turn_rewards: list[float] = []
        """Inline reward of each step so far."""
        self._components: dict[str, float] = {}
        self._success: bool | None = None
        self._num_turns = 0
        self._num_invalid = 0

    async def start(self, seed: int) -> list[Message]:
        """The opening messages of the episode of this seed."""
        self._environment = make_environment(self.family)
        return await self._environment.reset(seed)

    async def act(self, action: str) -> list[Message]:
        """Apply an action; returns what the policy sees next, and nothing when the episode is over."""
        assert self._environment is not None and not self.over, (self.name, self.over)
        step = await self._environment.step(action)
        self._num_turns += 1
        self.turn_rewards.append(step.reward)
        for name, value in step.components.items():
            self._components[name] = self._components.get(name, 0.0) + value
        self._num_invalid += step.invalid_action
        self._success = step.success if step.success is not None else self._success
        self.over = step.terminated or step.truncated or self._num_turns >= self._environment.max_turns
        return [] if self.over else step.observation

    async def outcome(self, num_sampled_tokens: int = 0) -> Outcome:
        """Judge the episode and close it. An episode cut by the context limit is judged as it stands."""
        assert self._environment is not None, self.name
        judgement = self._environment.judgement()
        payload = await judgement if inspect.isawaitable(judgement) else judgement
        reward, success, components = sum(self.turn_rewards), bool(self._success), self._components
        if payload is not None and self._scorer.runs == "pool":
            score = self._scorer.score(
                ScoringRequest(
                    trajectory_id=self.name,
                    family=self.name,
                    scorer=self._scorer.name,
                    scorer_version=self._scorer.version,
                    payload={"num_invalid_actions": self._num_invalid, **payload},
                    deadline_s=self.family.score_deadline_s,
                )
            )
            assert score.reward is not None, score.failure_message
            reward, success, components = score.reward, bool(score.success), score.components
        await self._environment.close()
        return Outcome(self.name, reward, success, self._num_turns, num_sampled_tokens, dict(components))
