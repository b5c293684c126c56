"""What does a noisy expert play? Text episodes for the warm start, and success rates for the reference rows of a
benchmark."""

from __future__ import annotations

import asyncio
import inspect
import random
from dataclasses import dataclass
from typing import Literal

from resources.environments.base import Environment, Message, ScriptedExpert
from resources.environments.family import FamilyConfig
from resources.environments.registry import make_environment
from resources.environments.seeds import episode_seed
from resources.failures import RewardFailure
from resources.rewards.base import Score, ScoringRequest
from resources.rewards.scorers.registry import ResolvedScorer, resolve_scorer
from resources.rollout.messages import Split


@dataclass(frozen=True, slots=True)
class Transcript:
    """One episode as text. The assistant's messages are the actions; every other message is context."""

    messages: list[Message]
    reward: float
    success: bool


async def noisy_expert_episode(
    config: FamilyConfig, seed: int, p_random: float, rng: random.Random, *, family: str = ""
) -> Transcript:
    """Play one episode: each action is a random valid one with probability ``p_random``, else the expert's.

    The family's own scorer judges it, on the spot if it is one of the reward pool. Raises ValueError when the
    environment offers no scripted expert, EnvironmentFailure or RewardFailure when a part fails.
    """
    environment = make_environment(config, family=family)
    if not isinstance(environment, ScriptedExpert):
        raise ValueError(
            f"environment {config.environment!r} has no scripted expert: give it expert_action() and "
            "random_action(rng), or leave its family out of the warm start"
        )
    try:
        messages = list(await environment.reset(seed))
        reward, success = 0.0, False
        for _ in range(environment.max_turns):
            action = environment.random_action(rng) if rng.random() < p_random else environment.expert_action()
            messages.append(Message(role="assistant", content=action))
            outcome = await environment.step(action)
            reward += outcome.reward
            success = bool(outcome.success)
            if outcome.terminated or outcome.truncated:
                break
            messages.extend(outcome.observation)
        scorer = resolve_scorer(config.scorer, config.scorer_arguments)
        if scorer.runs == "pool":
            score = await _score(scorer, environment, config, family or config.environment)
            reward, success = score.reward or 0.0, bool(score.success)
    finally:
        await environment.close()
    return Transcript(messages, reward, success)


async def _score(scorer: ResolvedScorer, environment: Environment, config: FamilyConfig, family: str) -> Score:
    """The verdict that the reward pool would give, worked out here."""
    judgement = environment.judgement()
    payload = await judgement if inspect.isawaitable(judgement) else judgement
    if payload is None:
        raise ValueError(
            f"{family}: the scorer {scorer.name!r} runs on the reward pool, but {config.environment!r} has no "
            "judgement(); return its payload there, or use the scorer 'environment'"
        )
    request = ScoringRequest("", family, scorer.name, scorer.version, payload, config.score_deadline_s)
    score = await asyncio.to_thread(scorer.score, request)
    if score.failure is not None:
        raise RewardFailure(f"{family}: the scorer {scorer.name!r} failed: {score.failure_message}")
    return score


async def policy_rate(
    config: FamilyConfig,
    actor: Literal["expert", "random"],
    num_episodes: int,
    seed: int,
    *,
    family: str = "",
    split: Split = "eval",
) -> float:
    """Share of solved episodes of the expert, or of uniformly random valid actions."""
    family = family or config.environment
    p_random = {"expert": 0.0, "random": 1.0}[actor]
    rng = random.Random(f"{seed} {family} {actor}")
    solved = 0
    for index in range(num_episodes):
        episode = episode_seed(seed, family, index, split)
        solved += (await noisy_expert_episode(config, episode, p_random, rng, family=family)).success
    return solved / num_episodes
