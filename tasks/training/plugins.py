"""Where algorithms are found: built-in ones by name, a user's own by import path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

ESTIMATORS: Mapping[str, str] = {"grpo": "tasks.training.advantages.grpo:GRPO"}
"""Built-in advantage estimators."""
LOSSES: Mapping[str, str] = {
    "ppo_clip": "tasks.training.losses.ppo_clip:PPOClip",
    "decoupled": "tasks.training.losses.decoupled:DecoupledPPO",
}
"""Built-in token losses."""
NORMALISERS: Mapping[str, str] = {
    "family_token_mean": "tasks.training.normalisers:family_token_mean",
    "token_mean": "tasks.training.normalisers:token_mean",
    "sequence_mean": "tasks.training.normalisers:sequence_mean",
}
"""Built-in denominators."""


def check_name(setting: str, name: str, built_in: Mapping[str, str]) -> str:
    """The name itself, if it is built in or has the form of an import path. Imports nothing.

    Raises:
        ValueError: naming the setting, the value and what is allowed.
    """
    module, colon, attribute = name.partition(":")
    if name in built_in or (colon and module and attribute.isidentifier()):
        return name
    raise ValueError(f"{setting} is {name!r}; allowed: {', '.join(built_in)}, or an import path package.module:Name")


def resolve(setting: str, name: str, built_in: Mapping[str, str]) -> Any:
    """The object that a built-in name or an import path names.

    Raises:
        ValueError: naming the setting, when there is no such module or attribute.
    """
    path = built_in.get(name, check_name(setting, name, built_in))
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{setting} is {name!r}, but module {error.name!r} is not importable; install it on every worker, "
            "or correct the path"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"{setting} is {name!r}, but {module_name} has no {attribute!r}")
    return getattr(module, attribute)
