"""The chat format with its answers kept: siblings share an opening, and environments repeat their observations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from resources.environments.base import Message


class Format(Protocol):
    """What rollouts need of a chat format (`resources.policy.chat_format.ChatFormat`)."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def tokenizer_hash(self) -> str: ...
    @property
    def template_hash(self) -> str: ...

    def opening(self, messages: Sequence[Message]) -> np.ndarray: ...
    def continuation(self, observation: Sequence[Message], last_token_id: int | None) -> np.ndarray: ...
    def extension(self, messages: Sequence[Message], token_ids: np.ndarray) -> np.ndarray | None: ...
    def decode_action(self, token_ids: Sequence[int] | np.ndarray) -> str: ...


class EncodingCache:
    """Bounded, least recently used first out. Arrays that it returns are read-only."""

    def __init__(self, chat: Format, max_entries: int = 4096) -> None:
        self._chat = chat
        self._max_entries = max_entries
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self.num_hits = self.num_misses = 0
        self.stop_token_ids = tuple(chat.stop_token_ids)
        self.tokenizer_hash = chat.tokenizer_hash
        self.template_hash = chat.template_hash

    def opening(self, messages: Sequence[Message]) -> np.ndarray:
        return self._kept(("opening", _key(messages)), lambda: _frozen(self._chat.opening(messages)))

    def continuation(self, observation: Sequence[Message], last_token_id: int | None) -> np.ndarray:
        # All that a continuation depends on is whether, and with which stop token, the action ended.
        stop = last_token_id if last_token_id is None or last_token_id in self.stop_token_ids else -1
        key = ("continuation", _key(observation), stop)
        return self._kept(key, lambda: _frozen(self._chat.continuation(observation, last_token_id)))

    def extension(self, messages: Sequence[Message], token_ids: np.ndarray) -> np.ndarray | None:
        """Not kept: no two histories are alike."""
        return self._chat.extension(messages, token_ids)

    def whole(self, messages: Sequence[Message]) -> np.ndarray:
        """The ids of a conversation under way. Not kept either."""
        return self._chat.opening(messages)

    def decode_action(self, token_ids: np.ndarray) -> str:
        return self._kept(("action", token_ids.tobytes()), lambda: self._chat.decode_action(token_ids))

    def _kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        try:
            value = self._entries[key]
        except KeyError:
            self.num_misses += 1
            value = self._entries[key] = make()
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
            return value
        self.num_hits += 1
        self._entries.move_to_end(key)
        return value


def _key(messages: Sequence[Message]) -> tuple[tuple[str | None, ...], ...]:
    """Everything of the messages that a template may print; only the assistant's have `tool_calls`."""
    return tuple(
        (message["role"], message["content"], message.get("name"), message.get("tool_call_id")) for message in messages
    )


def _frozen(token_ids: np.ndarray) -> np.ndarray:
    token_ids = np.asarray(token_ids, dtype=np.int32)
    token_ids.flags.writeable = False
    return token_ids
