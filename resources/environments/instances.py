"""Which class is behind the name of an environment, and does it take these arguments? Loads nothing but that class."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

BUILT_IN = {
    "frozen_lake": "resources.environments.frozen_lake:FrozenLake",
    "guess_number": "resources.environments.guess_number:GuessNumber",
    "calculator": "resources.environments.calculator:Calculator",
    "code_repair": "resources.environments.code_repair:CodeRepair",
}
ADAPTERS = {
    "gymnasium": "resources.environments.adapters.gymnasium_text:GymnasiumText",
    "openenv": "resources.environments.adapters.openenv_remote:OpenEnvEnvironment",
    "reasoning_gym": "resources.environments.adapters.reasoning_gym_text:ReasoningGymProblem",
    "skyrl_gym": "resources.environments.adapters.skyrl_gym_text:SkyRLGymText",
    "textarena": "resources.environments.adapters.textarena_games:TextArenaGame",
    "tool_server": "resources.environments.tools.tool_server:ToolServerEnvironment",
}
"""Environments of other libraries and of servers; what is played is said by their arguments."""


def instantiate_named(name: str, arguments: Mapping[str, Any]) -> Any:
    """A bare environment, without deadlines.

    Raises ValueError for an unknown name, an import that fails, wrong arguments, or a class that is no environment.
    """
    cls = resolve(name)
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        allowed = [name for name in inspect.signature(cls).parameters]
        raise ValueError(
            f"environment {name!r} does not take the arguments {arguments!r}: {error}; it takes {allowed}"
        ) from error
    try:
        environment = cls(**arguments)
    except Exception as error:
        raise ValueError(f"environment {name!r} with {arguments!r}: {error}") from error
    if not isinstance(getattr(environment, "env_version", None), str):
        raise ValueError(f"environment {name!r} has no env_version; set it to a string such as '1'")
    max_turns = getattr(environment, "max_turns", None)
    if not isinstance(max_turns, int) or max_turns < 1:
        raise ValueError(f"environment {name!r}: max_turns is {max_turns!r}; set it to an integer of at least 1")
    return environment


def resolve(name: str) -> type:
    """The class behind a built-in name or an import path. Raises ValueError saying what is wrong and what is
    allowed."""
    path = {**BUILT_IN, **ADAPTERS}.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon or not module_name or not class_name:
        raise ValueError(
            f"environment {name!r} is unknown; use one of {', '.join(sorted(BUILT_IN))}, "
            f"an adapter ({', '.join(sorted(ADAPTERS))}), or an import path 'package.module:Class'"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"environment {name!r}: module {module_name!r} does not import ({error}); it must be installed, "
            "or on PYTHONPATH, in every process of the run"
        ) from error
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        classes = sorted(
            key for key, value in vars(module).items() if isinstance(value, type) and value.__module__ == module_name
        )
        raise ValueError(f"environment {name!r}: {module_name!r} has no class {class_name!r}; it has {classes}")
    missing = [method for method in ("reset", "step") if not callable(getattr(cls, method, None))]
    if missing:
        raise ValueError(
            f"environment {name!r} has no method {' and no '.join(missing)}; "
            "an environment has reset(seed) and step(action)"
        )
    return cls
