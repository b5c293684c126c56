"""Where algorithms are found: built-in ones by name, a user's own by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

ESTIMATORS: Mapping[str, str] = {
    "grpo": "tasks.training.advantages.grpo:GRPO",
    "rloo": "tasks.training.advantages.rloo:RLOO",
    "reinforce_plus_plus": "tasks.training.advantages.reinforce_plus_plus:ReinforcePlusPlus",
    "reinforce_plus_plus_baseline": "tasks.training.advantages.reinforce_plus_plus:ReinforcePlusPlusBaseline",
    "gdpo": "tasks.training.advantages.gdpo:GDPO",
    "turn_returns": "tasks.training.advantages.turn_returns:TurnReturns",
    "gigpo": "tasks.training.advantages.gigpo:GiGPO",
    "gae": "tasks.training.advantages.gae:GAE",
}
"""Built-in advantage estimators."""
GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "gdpo", "turn_returns", "gigpo")
"""Those that compare the members of a group with each other, and learn nothing from a group of one."""
LOSSES: Mapping[str, str] = {
    "ppo_clip": "tasks.training.losses.ppo_clip:PPOClip",
    "decoupled": "tasks.training.losses.decoupled:DecoupledPPO",
    "policy_gradient": "tasks.training.losses.policy_gradient:PolicyGradient",
    "gspo": "tasks.training.losses.gspo:GSPO",
    "cispo": "tasks.training.losses.cispo:CISPO",
    "tis": "tasks.training.losses.tis:TIS",
    "topr": "tasks.training.losses.topr:TOPR",
    "kimi": "tasks.training.losses.kimi:Kimi",
}
"""Built-in token losses."""
RATIO_LOSSES = ("ppo_clip", "decoupled", "gspo", "cispo", "tis", "topr")
"""Those that weigh a token by a ratio of policies."""
CORRECTIONS: Mapping[str, str] = {
    "truncated_weight": "tasks.training.corrections.weights:TruncatedWeight",
    "masked_weight": "tasks.training.corrections.weights:MaskedWeight",
    "ratio_mask": "tasks.training.corrections.weights:RatioMask",
    "staleness_mask": "tasks.training.corrections.staleness_mask:StalenessMask",
    "m2po": "tasks.training.corrections.m2po:M2PO",
}
"""Built-in off-policy corrections."""
WEIGHTING_CORRECTIONS = ("truncated_weight", "masked_weight")
"""Those that weigh tokens by proximal / behaviour; the others only mask."""
NORMALISERS: Mapping[str, str] = {
    "family_token_mean": "tasks.training.normalisers:family_token_mean",
    "token_mean": "tasks.training.normalisers:token_mean",
    "sequence_mean": "tasks.training.normalisers:sequence_mean",
    "fixed_length": "tasks.training.normalisers:fixed_length",
}
"""Built-in denominators."""


def check_name(setting: str, name: str, built_in: Mapping[str, str]) -> str:
    """The name itself, if it is built in or has the form of an import path. Imports nothing.

    Raises:
        ValueError: naming the setting, the value and what is allowed.
    """
    module, colon, attribute = name.partition(":")
    if name in built_in or (colon and all(part.isidentifier() for part in (*module.split("."), attribute))):
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
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"{setting} is {name!r}, but importing module {module_name!r} raised {type(error).__name__}: {error}; "
            "correct the module"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"{setting} is {name!r}, but {module_name} has no {attribute!r}; correct the path")
    return getattr(module, attribute)


def build(setting: str, name: str, built_in: Mapping[str, str], config: object, *members: str) -> Any:
    """An object of the class that a built-in name or an import path names, made with its section.

    Args:
        members: what it must have: methods that take one argument, and ``needs_proximal``.

    Raises:
        ValueError: naming the setting, when it cannot be made, or lacks a member.
    """
    made = resolve(setting, name, built_in)
    if name in built_in:
        return made(config)
    if not isinstance(made, type):
        raise ValueError(f"{setting} is {name!r}, which is no class but of type {type(made).__name__}; name a class")
    try:
        part = made(config)
    except Exception as error:
        raise ValueError(
            f"{setting} is {name!r}, whose constructor raised {type(error).__name__}: {error}; it is called with the "
            "section of the configuration that names it, and what it needs beyond is the section's `arguments`"
        ) from error
    for member in members:
        if not hasattr(part, member):
            raise ValueError(f"{setting} is {name!r}, which has no {member!r}; it must have {' and '.join(members)}")
        if callable(value := getattr(part, member)):
            check_takes(f"{setting} is {name!r}, whose {member}", value, 1)
    return part


def check_takes(whose: str, function: Callable[..., Any], number: int) -> None:
    """Raises ValueError unless it is a function that can be called with so many positional arguments."""
    if not callable(function):
        raise ValueError(f"{whose} is no function but of type {type(function).__name__}")
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError as error:
        raise ValueError(
            f"{whose} does not take {number} positional argument{'s' if number > 1 else ''} ({error}); see "
            "docs/algorithms.md, 'Your own'"
        ) from error
