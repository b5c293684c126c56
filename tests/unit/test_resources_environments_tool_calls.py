"""Tool calls are read from text: Hermes' form, OpenAI's, and what is neither."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resources.environments.tools.tool_calls import Tool, parse_reply
from tests.unit.tool_environments import call, openai


def test_hermes_calls_are_read_in_order_with_what_is_said_beside_them() -> None:
    reply = parse_reply(f"Let me see. {call('divide', a=6, b=3)}\n{call('give_up')} so", 2)
    assert reply.content == "Let me see. \n so"
    assert [(each.id, each.name, each.arguments, each.error) for each in reply.calls] == [
        ("call_2_0", "divide", {"a": 6, "b": 3}, None),
        ("call_2_1", "give_up", {}, None),
    ]
    assert reply.calls[0].declaration() == {
        "id": "call_2_0",
        "type": "function",
        "function": {"name": "divide", "arguments": '{"a": 6, "b": 3}'},
    }


def test_openai_messages_keep_their_ids() -> None:
    reply = parse_reply(openai(("x1", "divide", '{"a": 6, "b": 3}'), ("", "give_up", ""), content="hm"), 0)
    assert reply.content == "hm"
    assert [(each.id, each.name, each.arguments) for each in reply.calls] == [
        ("x1", "divide", {"a": 6, "b": 3}),
        ("call_0_1", "give_up", {}),
    ]
    twice = parse_reply(openai(("x1", "divide", "{}"), ("x1", "divide", "{}")), 0)
    assert [each.id for each in twice.calls] == ["x1", "call_0_1"], "an answer must belong to one call"


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ('<tool_call>{"name": "divide", "arguments": {"a":', "divide", "the call is no JSON"),
        ('<tool_call>{"name": "divide", "arguments": {"a":</tool_call>', "divide", "the call is no JSON"),
        (openai(("x1", "divide", '{"a":')), "divide", "the arguments are no JSON"),
        ('{"tool_calls": [{"id": "x1", "function": {"name": "divide"', "", "the message is no JSON"),
        ('<tool_call>{"name": "divide", "arguments": [1]}</tool_call>', "divide", "the arguments are no JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', "", "the call names no tool"),
        ("<tool_call>[1]</tool_call>", "", "a call is"),
        ("<tool_call></tool_call>", "", "the call is no JSON"),
        ('<tool_call>{"name": "divide", "arguments": {"a": NaN, "b": 1}}</tool_call>', "divide", "NaN is no JSON"),
        ("<tool_call>" + '{"a":' * 100_000, "", "the call is no JSON"),
    ],
)
def test_what_cannot_be_read_is_one_call_that_says_why(text: str, name: str, error: str) -> None:
    (unreadable,) = parse_reply(text, 0).calls
    assert unreadable.name == name and unreadable.arguments is None
    assert unreadable.error is not None and error in unreadable.error and len(unreadable.error) <= 160
    assert unreadable.id == ("x1" if "x1" in text and "message" not in unreadable.error else "call_0_0")


@pytest.mark.parametrize("text", ["282", '{"answer": 3}', '{"tool_calls": []}', "", "a < b"])
def test_text_without_a_call_is_an_answer(text: str) -> None:
    assert parse_reply(text, 0).calls == () and parse_reply(text, 0).content == text


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (lambda: Tool("two words"), "a tool is called 'two words'"),
        (lambda: Tool("t", parameters={"type": "objekt"}), "tool 't': its parameters are no JSON schema"),
    ],
)
def test_a_tool_that_cannot_be_declared_is_refused(tool: Callable[[], Tool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tool()
