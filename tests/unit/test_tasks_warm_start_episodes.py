"""Expert episodes as rows: what is trained, what is context, and that it is the sequence an engine would see. M17."""

from __future__ import annotations

import asyncio

import pytest

from resources.environments.base import Message
from resources.environments.family import FamilyConfig
from resources.environments.registry import quickstart_families
from resources.policy.chat_format import ChatFormat
from resources.policy.config import PolicyConfig
from resources.policy.tiny import create_tiny_policy
from tasks.warm_start.config import WarmStartConfig
from tasks.warm_start.episodes import EpisodeEncoder, ExpertEpisodes

GUESS = {"guess_number": FamilyConfig(environment="guess_number", hardware_class="bandwidth")}
MESSAGES = [
    Message(role="system", content="guess: <answer>number</answer>"),
    Message(role="user", content="1 to 7"),
    Message(role="assistant", content="<answer>4</answer>"),
    Message(role="user", content="higher 5 to 7"),
    Message(role="assistant", content="<answer>6</answer>"),
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    corpus = asyncio.run(ExpertEpisodes(GUESS, WarmStartConfig(), 0).corpus(20))
    sizes = PolicyConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16)
    return ChatFormat.from_directory(create_tiny_policy(tmp_path_factory.mktemp("policy"), sizes, corpus, 0))


def test_actions_with_their_stop_token_are_trained_and_nothing_else(chat: ChatFormat) -> None:
    row = EpisodeEncoder(chat, 512).encode(MESSAGES)
    trained = [int(token) for token in row.token_ids[row.trained]]
    stop = chat.stop_token_ids[0]
    expected = []
    for action in ("<answer>4</answer>", "<answer>6</answer>"):
        expected += [*chat.tokenizer.encode(action, add_special_tokens=False), stop]
    assert trained == expected
    assert not row.trained[0] and row.trained[-1], "the row ends with the last action"


def test_the_row_is_what_a_rollout_appends_turn_by_turn(chat: ChatFormat) -> None:
    """M17: opening, sampled ids, continuation after the stop token, sampled ids."""
    row = EpisodeEncoder(chat, 512).encode(MESSAGES)
    stop = chat.stop_token_ids[0]
    first = [*chat.tokenizer.encode("<answer>4</answer>", add_special_tokens=False), stop]
    second = [*chat.tokenizer.encode("<answer>6</answer>", add_special_tokens=False), stop]
    history = [*chat.opening(MESSAGES[:2]), *first, *chat.continuation(MESSAGES[3:4], stop), *second]
    assert row.token_ids.tolist() == [int(token) for token in history]


def test_a_long_episode_is_cut_at_the_context(chat: ChatFormat) -> None:
    row = EpisodeEncoder(chat, 20).encode(MESSAGES)
    assert len(row.token_ids) == len(row.trained) == 20


def test_episodes_are_reproducible_fresh_and_in_proportion() -> None:
    config = WarmStartConfig(episodes_per_step={"guess_number": 3, "frozen_lake": 2, "calculator": 0, "code_repair": 0})

    async def two_steps(seed: int):
        episodes = ExpertEpisodes(quickstart_families(), config, seed)
        return await episodes.step(), await episodes.step()

    first, second = asyncio.run(two_steps(4))
    assert [episode.family for episode in first] == ["frozen_lake"] * 2 + ["guess_number"] * 3
    assert asyncio.run(two_steps(4)) == (first, second)
    assert first[0] != second[0]
    assert asyncio.run(two_steps(5))[0] != first


def test_a_configuration_that_leaves_every_family_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"warm_start\.episodes_per_step leaves out every family"):
        ExpertEpisodes(GUESS, WarmStartConfig(episodes_per_step={"guess_number": 0}), 0)
