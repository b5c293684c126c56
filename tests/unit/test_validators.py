"""A validator works only inside a class: one that is indented under a function is never called, and nobody notices."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for room in ("flows", "tasks", "resources") for path in (ROOT / room).rglob("*.py"))
VALIDATORS = {"field_validator", "model_validator", "field_serializer", "model_serializer", "computed_field"}


def stray_validators(source: str) -> list[str]:
    """Names of functions with a decorator of pydantic that do not stand directly in a class."""
    tree = ast.parse(source)
    in_classes = {id(child) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and id(node) not in in_classes and VALIDATORS & _decorators(node)
    ]


def _decorators(node: ast.FunctionDef) -> set[str]:
    calls = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}


def test_a_stray_validator_is_found() -> None:
    inside = "class Config:\n    @field_validator('name')\n    def check(cls, value):\n        return value\n"
    under_a_function = (
        "def other():\n    return 1\n\n    @pydantic.model_validator(mode='after')\n    def check(self): ...\n"
    )
    assert stray_validators(inside) == [] and stray_validators(under_a_function) == ["check"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_validator_stands_in_a_class(path: Path) -> None:
    assert stray_validators(path.read_text()) == []
