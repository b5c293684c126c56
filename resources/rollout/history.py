"""Which tokens does the next generation continue? Two ways to keep a history (`RolloutConfig.history`).

Both append to the tokens of the trajectory, and change nothing that lies there. The messages go through the chat
template; where it refuses them, the environment said what it cannot print, and the failure is the environment's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from resources.environments.base import Message
from resources.failures import EnvironmentFailure
from resources.rollout.encoding_cache import EncodingCache
from resources.rollout.episode_record import EpisodeRecord

Encoded = TypeVar("Encoded")


def append_opening(chat: EncodingCache, family: str, record: EpisodeRecord, messages: Sequence[Message]) -> None:
    """The prompt. Raises EnvironmentFailure when the template refuses it."""
    record.messages = list(messages)
    record.tokens.append_context(_encoded(family, chat.opening, messages))
    record.prompt_length = record.tokens.num_tokens


def append_observation(
    chat: EncodingCache,
    family: str,
    history: str,
    record: EpisodeRecord,
    observation: Sequence[Message],
    last_token_id: int | None,
) -> None:
    """What the environment answered, whose messages the record has. Raises EnvironmentFailure when the template refuses
    it.

    Args:
        history: ``append``: behind everything sampled and read, as it was. ``template``: as the template prints the
            whole conversation; where that does not continue the sequence under way, a new one begins with all of it.
        last_token_id: of the action before; None when it was empty.
    """
    tokens = record.tokens
    if history == "append":
        tokens.append_context(_encoded(family, chat.continuation, observation, last_token_id))
        return
    rest = _encoded(family, chat.extension, record.messages, tokens.sequence)
    if rest is None:
        rest = _encoded(family, chat.whole, record.messages)
        tokens.begin_sequence()
    tokens.append_context(rest)


def _encoded(family: str, encode: Callable[..., Encoded], *what: Any) -> Encoded:
    try:
        return encode(*what)
    except ValueError as error:
        raise EnvironmentFailure(f"{family}: {error}") from error
