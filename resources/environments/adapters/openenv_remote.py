"""Remote environments over OpenEnv's WebSocket protocol (openenv 0.10): the episode is a session of a server, one of
several.

A session is a connection to ``/ws``. ``{"type": "reset", "data": {"seed": ...}}`` and ``{"type": "step", "data": ...}``
are answered by ``{"type": "observation", "data": {"observation", "reward", "done"}}`` or by ``{"type": "error", "data":
{"message", "code"}}``. The protocol is spoken here: openenv's own client imports its server, seconds of imports and 130
MB of packages that a rollout worker does not need.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import jsonschema
from jsonschema.exceptions import best_match
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from resources.environments.action_text import malformed, parse_action
from resources.environments.base import Message, StepOutcome
from resources.environments.seeds import narrow_seed
from resources.environments.tools.addresses import check_addresses, in_turn
from resources.failures import EnvironmentFailure

_FULL_PAUSE_S = 0.2
"""Between two rounds over servers that are all full."""
_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_NOT_SHOWN = ("metadata", "done", "reward")


class _Full(EnvironmentFailure):
    """A server has no session left."""


class OpenEnvEnvironment:
    """The policy's text becomes an action, the observation a user message.

    A server that is not there or full is passed over for the next address; when all are full, the episode waits for one
    (``full_deadline_s``). A connection lost in the middle takes the episode's state with it: that is a
    failure of the environment, and its retry begins anew elsewhere.
    """

    env_version = "1/openenv"

    def __init__(
        self,
        addresses: Sequence[str],
        max_turns: int = 16,
        action: Literal["text", "json"] = "text",
        action_field: str = "message",
        action_schema: Mapping[str, Any] | None = None,
        observation_field: str | None = None,
        instruction: str | None = None,
        reset_arguments: Mapping[str, Any] | None = None,
        solved_reward: float | None = None,
        connect_deadline_s: float = 5.0,
        full_deadline_s: float = 20.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            addresses: ``ws://host:port`` (or ``wss``, ``http``, ``https``); episodes go round.
            action: ``text``: the policy's text goes into ``action_field`` as it is; ``json``: the policy says
                ``<act>{...}</act>``, the whole action.
            action_schema: JSON schema that a ``json`` action must fit (the server's ``GET /schema`` has it under
                ``action``); what does not fit is malformed and is not sent.
            observation_field: the field that is shown; None: the only text of the observation, or all of it as JSON.
            instruction: a system message before the first observation.
            reset_arguments: sent along with the seed.
            solved_reward: an episode whose last reward is at least this is solved; None: the server's
                ``metadata.success``, else unknown.
            connect_deadline_s: for one address, in seconds.
            full_deadline_s: longest wait while every server is full, in seconds; keep it below ``reset_deadline_s``.
            headers: of the connection (an authorization, say).

        Raises ValueError for what is no address, action or schema.
        """
        self._addresses = tuple(
            _websocket(address) for address in check_addresses(addresses, ("ws", "wss", "http", "https"))
        )
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; it must be at least 1")
        if action not in ("text", "json"):
            raise ValueError(f"action is {action!r}; it must be 'text' or 'json'")
        if action_schema is not None:
            try:
                jsonschema.Draft202012Validator.check_schema(dict(action_schema))
            except jsonschema.SchemaError as error:
                raise ValueError(f"action_schema is no JSON schema ({error.message})") from error
        self.max_turns, self._action, self._action_field = max_turns, action, action_field
        self._action_schema, self._observation_field = action_schema, observation_field
        self._instruction, self._reset_arguments = instruction, dict(reset_arguments or {})
        self._solved_reward, self._connect_deadline_s = solved_reward, connect_deadline_s
        self._full_deadline_s, self._headers = full_deadline_s, dict(headers or {})
        self._connection: ClientConnection | None = None
        self._address = ""

    async def reset(self, seed: int) -> list[Message]:
        self._turns = 0
        data = await self._open({**self._reset_arguments, "seed": narrow_seed(seed)})
        opening = [Message(role="user", content=self._text(data))]
        if self._instruction:
            opening.insert(0, Message(role="system", content=self._instruction))
        return opening

    async def step(self, action: str) -> StepOutcome:
        self._turns += 1
        is_last = self._turns >= self.max_turns
        try:
            data = await self._exchange("step", self._parse(action))
        except ValueError as error:
            return malformed(str(error), truncated=is_last)
        reward = float(data.get("reward") or 0.0)
        metadata = _metadata(data)
        done = bool(data.get("done"))
        truncated = (done and bool(metadata.get("truncated"))) or (is_last and not done)
        over = done or truncated
        return StepOutcome(
            [] if over else [Message(role="user", content=self._text(data))],
            reward=reward,
            terminated=done and not truncated,
            truncated=truncated,
            success=self._success(reward, metadata) if over else None,
        )

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(WebSocketException):  # it may be closed already
                await connection.send(json.dumps({"type": "close"}))
            await connection.close()

    async def _open(self, reset: Mapping[str, Any]) -> dict[str, Any]:
        """A session on the first address that takes one, and its first observation."""
        end = asyncio.get_running_loop().time() + self._full_deadline_s
        while True:
            troubles: list[EnvironmentFailure] = []
            for address in in_turn(self._addresses):
                await self.close()
                try:
                    await self._connect(address)
                    return await self._exchange("reset", reset)
                except EnvironmentFailure as failure:
                    troubles.append(failure)
            await self.close()
            is_late = asyncio.get_running_loop().time() >= end
            if is_late or not all(isinstance(trouble, _Full) for trouble in troubles):
                raise EnvironmentFailure(f"no OpenEnv server took the episode: {'; '.join(map(str, troubles))}")
            await asyncio.sleep(_FULL_PAUSE_S)

    async def _connect(self, address: str) -> None:
        self._address = address
        try:
            self._connection = await connect(
                f"{address}/ws",
                open_timeout=self._connect_deadline_s,
                close_timeout=self._connect_deadline_s,
                max_size=_MAX_MESSAGE_BYTES,
                additional_headers=self._headers,
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise EnvironmentFailure(f"{address} takes no connection ({type(error).__name__}: {error})") from error

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The data of the observation. Raises ValueError for an action that the server calls invalid."""
        assert self._connection is not None, "reset comes first"
        try:
            with suppress(ConnectionClosed):  # a full server says so and closes, before anything is sent
                await self._connection.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(await self._connection.recv())
            answer = dict(reply["data"])
        except (WebSocketException, OSError) as error:
            if kind == "reset":  # what a full server says may be lost with the connection that it closes at once
                raise _Full(f"{self._address} closed before the first observation ({error})") from error
            raise EnvironmentFailure(f"{self._address} broke off during {kind} ({error})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise EnvironmentFailure(f"{self._address} does not speak OpenEnv: {kind} gave {error!r}") from error
        if reply.get("type") == "observation":
            return answer
        code, message = answer.get("code"), str(answer.get("message"))
        if code == "CAPACITY_REACHED":
            raise _Full(f"{self._address} is full ({message})")
        if code == "VALIDATION_ERROR" and kind == "step" and self._action == "json":
            raise ValueError(_validation(answer))
        raise EnvironmentFailure(f"{self._address} answered {kind} with {code or reply.get('type')}: {message}")

    def _parse(self, text: str) -> dict[str, Any]:
        if self._action == "text":
            return {self._action_field: text}
        parsed = parse_action(text, ("act",))
        if parsed is None:
            raise ValueError("say <act>{...}</act>")
        try:
            action = json.loads(parsed[1])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the action is no JSON: {error}") from None
        if not isinstance(action, dict):
            raise ValueError("the action is no JSON object")
        if self._action_schema is not None:
            validator = jsonschema.Draft202012Validator(dict(self._action_schema))
            error = best_match(validator.iter_errors(action))
            if error is not None:
                raise ValueError(f"{'.'.join(map(str, error.absolute_path)) or 'action'}: {error.message}"[:160])
        return action

    def _text(self, data: Mapping[str, Any]) -> str:
        observation = {
            key: value
            for key, value in (data.get("observation") or {}).items()
            if key not in ("metadata", "done", "reward")
        }
        if self._observation_field is not None:
            if self._observation_field not in observation:
                raise EnvironmentFailure(
                    f"{self._address} sent no {self._observation_field!r}; its observation has {sorted(observation)}"
                )
            value = observation[self._observation_field]
            return value if isinstance(value, str) else json.dumps(value)
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation, sort_keys=True)

    def _success(self, reward: float, metadata: Mapping[str, Any]) -> bool | None:
        if self._solved_reward is not None:
            return reward >= self._solved_reward
        success = metadata.get("success")
        return None if success is None else bool(success)


def _metadata(data: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = data.get("metadata") or (data.get("observation") or {}).get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def _validation(answer: Mapping[str, Any]) -> str:
    errors = answer.get("errors")
    first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], dict) else {}
    place = ".".join(map(str, first.get("loc", ()))) or "action"
    return f"{place}: {first.get('msg', answer.get('message'))}"[:160]


def _websocket(address: str) -> str:
    return "ws" + address.removeprefix("http") if address.startswith("http") else address
