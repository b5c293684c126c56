"""How does a value of a gymnasium space read as text, and which value does a text name?"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from gymnasium import spaces

MAX_ELEMENTS = 64
"""Numbers in one observation, at most; a picture is no text."""
_STYLED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def check_readable(space: spaces.Space[Any]) -> None:
    """Raises ValueError when values of ``space`` cannot be shown as text."""
    match space:
        case spaces.Dict():
            for part in space.spaces.values():
                check_readable(part)
        case spaces.Tuple():
            for part in space.spaces:
                check_readable(part)
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            size = int(np.prod(space.shape))
            if size > MAX_ELEMENTS:
                raise ValueError(f"its observations hold {size} numbers; at most {MAX_ELEMENTS} can be shown as text")
        case spaces.Discrete() | spaces.Text():
            pass
        case _:
            raise ValueError(f"observations of {type(space).__name__} cannot be shown as text")


def value_text(space: spaces.Space[Any], value: Any) -> str:
    """``value`` for people and policies: numbers to three digits, an array row by row, a Dict as ``key: value``
    lines."""
    match space:
        case spaces.Dict():
            return "\n".join(f"{key}: {value_text(part, value[key])}" for key, part in space.spaces.items())
        case spaces.Tuple():
            return " ".join(value_text(part, each) for part, each in zip(space.spaces, value, strict=True))
        case spaces.Text():
            return str(value)
        case spaces.Discrete():
            return str(int(value))
        case _:
            array = np.asarray(value)
            rows = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(1, -1)
            return "\n".join(" ".join(_number(each) for each in row) for row in rows)


def parse_value(space: spaces.Space[Any], text: str) -> Any:
    """The value of ``space`` that an action's text names: itself for Text, JSON for everything else.

    Raises ValueError saying what is wrong.
    """
    if isinstance(space, spaces.Text):
        value: Any = text
    else:
        try:
            value = _from_json(space, json.loads(text))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            raise ValueError(f"no value of {space}") from None
    if not space.contains(value):
        raise ValueError(f"not in {space}")
    return value


def plain_text(rendered: str) -> str:
    """An ``ansi`` rendering without escape sequences. What they tell by colour is kept: a coloured cell reads ``[S]``,
    and ``[blue:R]`` where a picture uses several colours."""
    runs = [match[1] for match in _STYLED.finditer(rendered)]
    several = len({_colour(codes) for codes in runs}) > 1

    def marked(match: re.Match[str]) -> str:
        colour = f"{_colour(match[1])}:" if several else ""
        return f"[{colour}{match[2]}]"

    return _ESCAPE.sub("", _STYLED.sub(marked, rendered)).strip("\n")


def _from_json(space: spaces.Space[Any], value: Any) -> Any:
    match space:
        case spaces.Dict():
            return {key: _from_json(part, value[key]) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_from_json(part, each) for part, each in zip(space.spaces, value, strict=True))
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            array = np.asarray(value, dtype=np.float64)
            if np.issubdtype(space.dtype, np.integer) and not np.array_equal(array, np.trunc(array)):
                raise ValueError("not integers")
            return array.astype(space.dtype).reshape(space.shape)
        case _:
            return value


def _number(value: Any) -> str:
    return f"{value:.3g}" if np.issubdtype(type(value), np.floating) else str(int(value))


def _colour(codes: str) -> str:
    for code in codes.split(";"):
        number = int(code or 0)
        if number // 10 in (3, 4, 9, 10) and number % 10 < 8:
            return _COLOURS[number % 10]
    return "bold"
