"""Noisy expert episodes as token rows: every assistant message is an action and is trained, all else is context."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from resources.environments.base import Message
from resources.environments.family import FamilyConfig
from resources.environments.seeds import episode_seed
from resources.environments.transcripts import Transcript, noisy_expert_episode
from resources.policy.chat_format import ChatFormat
from tasks.training.packing import PackableSequence
from tasks.warm_start.config import WarmStartConfig

CORPUS_EPISODES = 64
"""Episodes of each family whose text the tiny policy's tokenizer is trained on."""


@dataclass(frozen=True, slots=True)
class Episode:
    family: str
    transcript: Transcript


class ExpertEpisodes:
    """An endless, reproducible supply. Problems are drawn from seeds that RL and evaluation never use."""

    def __init__(self, families: Mapping[str, FamilyConfig], config: WarmStartConfig, seed: int) -> None:
        self._families = {name: family for name, family in families.items() if config.episodes_of(name)}
        if not self._families:
            raise ValueError(
                f"warm_start.episodes_per_step leaves out every family of {sorted(families)}; "
                "give at least one a positive number, or set warm_start to null"
            )
        self._config = config
        self._seed = seed
        self._played = dict.fromkeys(self._families, 0)
        self._rngs = {name: random.Random(f"warm start {seed} {name}") for name in self._families}

    async def step(self) -> list[Episode]:
        """The fresh episodes of one optimizer step, in the families' proportions."""
        return [
            Episode(family, await self._play(family))
            for family in self._families
            for _ in range(self._config.episodes_of(family))
        ]

    async def corpus(self, num_episodes: int = CORPUS_EPISODES) -> list[str]:
        """Texts of further episodes of each family, for the tokenizer."""
        texts: list[str] = []
        for family in self._families:
            for _ in range(num_episodes):
                texts.extend(message["content"] for message in (await self._play(family)).messages)
        return texts

    async def _play(self, family: str) -> Transcript:
        index = self._played[family]
        self._played[family] += 1
        return await noisy_expert_episode(
            self._families[family],
            episode_seed(self._seed, f"warm start {family}", index, "train"),
            self._config.noise_of(family),
            self._rngs[family],
            family=family,
        )


class EpisodeEncoder:
    """Turns episodes into rows. Texts come again and again (actions, feedback), so each is encoded once."""

    def __init__(self, chat: ChatFormat, context_length: int) -> None:
        self._chat = chat
        self._context_length = context_length
        self._actions: dict[str, np.ndarray] = {}
        self._openings: dict[tuple[tuple[str, str], ...], np.ndarray] = {}
        self._continuations: dict[tuple[tuple[str, str], ...], np.ndarray] = {}

    def encode(self, messages: Sequence[Message]) -> PackableSequence:
        """One row: opening, then action and stop token (trained), then the continuation up to the next action, and so
        on.

        Cut at ``context_length`` tokens. Raises ValueError when the messages do not begin with context.
        """
        context: list[Message] = []
        ids: list[np.ndarray] = []
        trained: list[np.ndarray] = []
        for message in messages:
            if message["role"] != "assistant":
                context.append(message)
                continue
            read = self._continuation(context) if ids else self._opening(context)
            action = self._action(message["content"])
            ids += [read, action]
            trained += [np.zeros(len(read), np.bool_), np.ones(len(action), np.bool_)]
            context = []
        if not ids:
            ids = [self._opening(context)]
            trained = [np.zeros(len(ids[0]), np.bool_)]
        return PackableSequence(
            np.concatenate(ids)[: self._context_length], np.concatenate(trained)[: self._context_length]
        )

    def _opening(self, messages: list[Message]) -> np.ndarray:
        key = _key(messages)
        if key not in self._openings:
            self._openings[key] = self._chat.opening(messages)
        return self._openings[key]

    def _continuation(self, observation: list[Message]) -> np.ndarray:
        key = _key(observation)
        if key not in self._continuations:
            self._continuations[key] = self._chat.continuation(observation, self._chat.stop_token_ids[0])
        return self._continuations[key]

    def _action(self, text: str) -> np.ndarray:
        if text not in self._actions:
            ids = self._chat.tokenizer.encode(text, add_special_tokens=False)
            self._actions[text] = np.array([*ids, self._chat.stop_token_ids[0]], np.int32)
        return self._actions[text]


def _key(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"]) for message in messages)
