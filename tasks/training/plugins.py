"""Where algorithms are found: built-in ones by name, a user's own by import path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
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
