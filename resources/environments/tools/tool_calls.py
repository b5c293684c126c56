"""Which tools does an assistant's text call, with which arguments? Hermes' and Qwen's ``<tool_call>`` tags, and
OpenAI's message form; what cannot be read keeps its place and says why, so that every call gets an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match

from resources.environments.base import Message

MAX_ERROR_CHARACTERS = 160
"""Of an error that the policy reads."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGGED = re.compile(
    re.escape(_OPEN) + r"(.*?)(?:" + re.escape(_CLOSE) + r"|(?=" + re.escape(_OPEN) + r")|\Z)", re.DOTALL
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as OpenAI's API declares it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a tool is called {self.name!r}; allowed are 1 to 64 letters, digits, '_', '.' and '-'")
        try:
            jsonschema.Draft202012Validator.check_schema(dict(self.parameters))
        except jsonschema.SchemaError as error:
            raise ValueError(f"tool {self.name!r}: its parameters are no JSON schema ({error.message})") from error

    def declaration(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, readable or not."""

    id: str
    name: str
    """Empty when the text names none."""
    arguments: Mapping[str, Any] | None
    """None when they cannot be read."""
    raw_arguments: str
    """JSON as the policy wrote it."""
    error: str | None = None
    """Why the call cannot be made, for the policy to read."""

    def declaration(self) -> dict[str, Any]:
        """In OpenAI's form, arguments as text."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.raw_arguments},
        }

    def answer(self, content: str) -> Message:
        """The tool message that belongs to this call."""
        return Message(role="tool", content=content, name=self.name, tool_call_id=self.id)


@dataclass(frozen=True, slots=True)
class Reply:
    """An assistant's text, taken apart."""

    calls: tuple[ToolCall, ...]
    content: str
    """What is said beside the calls."""


def parse_reply(text: str, turn: int) -> Reply:
    """The calls in an assistant's text, in order. A call without an id gets ``call_<turn>_<index>``.

    A text that begins as an OpenAI message (``{"tool_calls": ...``) is read as one; everything else may hold any number
    of ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the last of which may lack its end.
    """
    if _OPEN in text:
        bodies = [match[1] for match in _TAGGED.finditer(text)]
        calls = tuple(_tagged_call(body, f"call_{turn}_{index}") for index, body in enumerate(bodies))
        return Reply(calls, _TAGGED.sub("", text).strip())
    return _openai_reply(text, turn) or Reply((), text.strip())


def check_arguments(call: ToolCall, tools: Mapping[str, Tool]) -> str | None:
    """What is wrong with a call, for the policy to read; None: it can be made."""
    if call.error is not None:
        return call.error
    tool = tools.get(call.name)
    if tool is None:
        return _short(f"there is no tool {call.name!r}; there are {', '.join(tools)}")
    error = best_match(jsonschema.Draft202012Validator(dict(tool.parameters)).iter_errors(dict(call.arguments or {})))
    if error is None:
        return None
    place = ".".join(map(str, error.absolute_path))
    return _short(f"{place or 'arguments'}: {error.message}")


def _tagged_call(body: str, call_id: str) -> ToolCall:
    try:
        value = _json(body)
    except ValueError as error:
        # The name may still be readable, and is what a person looks for.
        found = re.search(r'"name"\s*:\s*"([^"]*)"', body)
        return ToolCall(call_id, found[1] if found else "", None, body.strip(), _short(f"the call is no JSON: {error}"))
    if not isinstance(value, dict):
        return ToolCall(call_id, "", None, body.strip(), 'a call is {"name": ..., "arguments": {...}}')
    return _call(value, value.get("arguments", {}), value.get("id"), call_id)


def _openai_reply(text: str, turn: int) -> Reply | None:
    if not text.lstrip().startswith("{") or '"tool_calls"' not in text:
        return None
    try:
        message = _json(text)
    except ValueError as error:
        call = ToolCall(f"call_{turn}_0", "", None, text.strip(), _short(f"the message is no JSON: {error}"))
        return Reply((call,), "")
    raw_calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(raw_calls, list) or not raw_calls:
        return None
    calls: list[ToolCall] = []
    for index, raw in enumerate(raw_calls):
        own = raw if isinstance(raw, dict) else {}
        function = own.get("function")
        function = function if isinstance(function, dict) else own
        call = _call(function, function.get("arguments", {}), own.get("id"), f"call_{turn}_{index}")
        if any(call.id == other.id for other in calls):
            call = _call(function, function.get("arguments", {}), None, f"call_{turn}_{index}")
        calls.append(call)
    content = message.get("content")
    return Reply(tuple(calls), content.strip() if isinstance(content, str) else "")


def _call(function: Mapping[str, Any], arguments: Any, given_id: Any, default_id: str) -> ToolCall:
    """A call from its parts; ``arguments`` is an object, or (OpenAI's form) the JSON text of one."""
    call_id = given_id if isinstance(given_id, str) and given_id else default_id
    name = function.get("name")
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    if not isinstance(name, str) or not name:
        return ToolCall(call_id, "", None, raw, "the call names no tool")
    if isinstance(arguments, str):
        try:
            arguments = _json(arguments) if arguments.strip() else {}
        except ValueError as error:
            return ToolCall(call_id, name, None, raw, _short(f"the arguments are no JSON: {error}"))
    if not isinstance(arguments, dict):
        return ToolCall(call_id, name, None, raw, "the arguments are no JSON object")
    return ToolCall(call_id, name, arguments, raw)


def _json(text: str) -> Any:
    """As JSON has it: no NaN, which a schema would let through. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _short(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 3] + "..."


def declarations_text(tools: Sequence[Tool]) -> str:
    """The tools as a system message shows them to a model trained on Hermes' format."""
    lines = "\n".join(json.dumps(tool.declaration(), separators=(",", ":")) for tool in tools)
    return (
        f"You may call tools:\n<tools>\n{lines}\n</tools>\n"
        'Call one with <tool_call>{"name": ..., "arguments": {...}}</tool_call>; text without a call is your answer.'
    )
