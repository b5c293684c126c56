"""What does a noisy expert play? Text episodes for the warm start, and success rates for the reference rows of a
benchmark."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from resources.environments.action_text import INVALID_ACTION_PENALTY
from resources.environments.base import Message, ScriptedExpert
from resources.environments.family import FamilyConfig
from resources.environments.registry import make_environment
from resources.environments.seeds import episode_seed
from resources.rollout.messages import Split
from resources.sandbox.runner import run_tests_async

QUICKSTART_NOISE: Mapping[str, float] = {"frozen_lake": 0.5, "guess_number": 0.6, "calculator": 0.3, "code_repair": 0.5}
"""Probability of a random valid action that leaves the warm start something for RL to learn, by family."""


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

    Raises ValueError when the environment offers no scripted expert, EnvironmentFailure when it fails.
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
        payload = environment.judgement()
        if payload is not None:
            success = await judge_payload(payload)
            reward = float(success) + INVALID_ACTION_PENALTY * payload.get("num_invalid_actions", 0)
    finally:
        await environment.close()
    return Transcript(messages, reward, success)


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


async def judge_payload(payload: Mapping[str, Any]) -> bool:
    """The verdict that the scorers ``exact_answer`` and ``unit_tests`` give on such a payload, worked out on the spot.

    Raises ValueError for a payload of another scorer.
    """
    if "expected" in payload:
        return payload["answer"] == payload["expected"]
    if "tests" in payload:
        return (await run_tests_async(payload["code"], payload["tests"])).passed
    raise ValueError(f"no built-in scorer judges a payload of {sorted(payload)}; success is unknown here")
