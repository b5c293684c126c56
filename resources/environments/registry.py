"""Which class plays a task family? Built-in names and import paths, with their arguments, checked before anything
runs."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from resources.environments.base import Environment, ScriptedExpert
from resources.environments.deadline import DeadlineEnvironment, DeadlineExpertEnvironment
from resources.environments.family import FamilyConfig
from resources.environments.threads import DaemonThreads

BUILT_IN = {
    "frozen_lake": "resources.environments.frozen_lake:FrozenLake",
    "guess_number": "resources.environments.guess_number:GuessNumber",
    "calculator": "resources.environments.calculator:Calculator",
    "code_repair": "resources.environments.code_repair:CodeRepair",
}


def quickstart_families() -> dict[str, FamilyConfig]:
    """Four families that a policy of half a million parameters learns on two cores. The classes are illustrative: the
    lake and the repairs carry long prompts (`compute`), the other two are mostly decode (`bandwidth`)."""
    return {
        "frozen_lake": FamilyConfig(environment="frozen_lake", hardware_class="compute", groups_per_iteration=6),
        "guess_number": FamilyConfig(environment="guess_number", hardware_class="bandwidth"),
        "calculator": FamilyConfig(environment="calculator", hardware_class="bandwidth", scorer="exact_answer"),
        "code_repair": FamilyConfig(environment="code_repair", hardware_class="compute", scorer="unit_tests"),
    }


def make_environment(config: FamilyConfig, *, family: str = "", threads: DaemonThreads | None = None) -> Environment:
    """A fresh environment of a family, its calls under the family's deadlines (see `DeadlineEnvironment`).

    ``family`` is the name in failure messages (default: the environment's). ``threads`` runs blocking environments
    (default: 64 threads that this process shares). A scripted expert stays one: ``isinstance(environment,
    ScriptedExpert)``. Raises ValueError for an unknown name, an import that fails, wrong arguments, or a class that is
    no environment.
    """
    inner = instantiate(config)
    wrapper = DeadlineExpertEnvironment if isinstance(inner, ScriptedExpert) else DeadlineEnvironment
    return wrapper(
        inner,
        family=family or config.environment,
        reset_deadline_s=config.reset_deadline_s,
        step_deadline_s=config.step_deadline_s,
        threads=threads or _shared_threads(),
    )


def instantiate(config: FamilyConfig) -> Any:
    """The bare environment, without deadlines. Raises as `make_environment`."""
    cls = resolve(config.environment)
    try:
        inspect.signature(cls).bind(**config.arguments)
    except TypeError as error:
        allowed = [name for name in inspect.signature(cls).parameters]
        raise ValueError(
            f"environment {config.environment!r} does not take the arguments {config.arguments!r}: {error}; "
            f"it takes {allowed}"
        ) from error
    try:
        environment = cls(**config.arguments)
    except Exception as error:
        raise ValueError(f"environment {config.environment!r} with {config.arguments!r}: {error}") from error
    if not isinstance(getattr(environment, "env_version", None), str):
        raise ValueError(f"environment {config.environment!r} has no env_version; set it to a string such as '1'")
    max_turns = getattr(environment, "max_turns", None)
    if not isinstance(max_turns, int) or max_turns < 1:
        raise ValueError(
            f"environment {config.environment!r}: max_turns is {max_turns!r}; set it to an integer of at least 1"
        )
    return environment


def resolve(name: str) -> type:
    """The class behind a built-in name or an import path. Raises ValueError saying what is wrong and what is
    allowed."""
    path = BUILT_IN.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon or not module_name or not class_name:
        raise ValueError(
            f"environment {name!r} is unknown; use one of {', '.join(sorted(BUILT_IN))}, "
            "or an import path 'package.module:Class'"
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


@functools.cache
def _shared_threads() -> DaemonThreads:
    # Stateless between calls, so runs in one process can share it without noticing each other.
    return DaemonThreads()
