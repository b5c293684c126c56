"""Which class plays a task family? Built-in names and import paths, with their arguments, checked before anything
runs."""

from __future__ import annotations

import functools
from typing import Any

from resources.environments.base import Environment, ScriptedExpert
from resources.environments.deadline import DeadlineEnvironment, DeadlineExpertEnvironment
from resources.environments.family import FamilyConfig
from resources.environments.instances import instantiate_named
from resources.environments.processes import ChildProcesses, ProcessEnvironment
from resources.environments.threads import DaemonThreads
from resources.environments.vector import StepTogether


def quickstart_families() -> dict[str, FamilyConfig]:
    """Four families that a policy of half a million parameters learns on two cores. The classes are illustrative: the
    lake and the repairs carry long prompts (`compute`), the other two are mostly decode (`bandwidth`)."""
    return {
        "frozen_lake": FamilyConfig(environment="frozen_lake", hardware_class="compute", groups_per_iteration=6),
        "guess_number": FamilyConfig(environment="guess_number", hardware_class="bandwidth"),
        "calculator": FamilyConfig(environment="calculator", hardware_class="bandwidth", scorer="exact_answer"),
        "code_repair": FamilyConfig(environment="code_repair", hardware_class="compute", scorer="unit_tests"),
    }


_CHILD_SPEAKS_FIRST_S = 1.0
"""A child is killed at its deadline by `ChildProcess`, which says so; the deadlines round it are a second later."""


def make_environment(
    config: FamilyConfig,
    *,
    family: str = "",
    threads: DaemonThreads | None = None,
    children: ChildProcesses | None = None,
    together: StepTogether | None = None,
) -> Environment:
    """A fresh environment of a family, its calls under the family's deadlines (see `DeadlineEnvironment`).

    ``family`` is the name in failure messages (default: the environment's). ``threads`` runs blocking environments
    (default: 64 threads that this process shares). With ``children`` it lives in one of these processes, whatever
    ``config.executor`` says, and offers no scripted expert. ``together`` takes the steps of those whose class offers
    ``step_many`` (`resources.environments.vector`). A scripted expert stays one: ``isinstance(environment,
    ScriptedExpert)``. Raises ValueError for an unknown name, an import that fails, wrong arguments, or a class that is
    no environment.
    """
    name, threads = family or config.environment, threads or _shared_threads()
    if children is not None:
        return DeadlineEnvironment(
            ProcessEnvironment(name, config, children),
            family=name,
            reset_deadline_s=config.processes.slot_deadline_s + config.reset_deadline_s + _CHILD_SPEAKS_FIRST_S,
            step_deadline_s=config.step_deadline_s + _CHILD_SPEAKS_FIRST_S,
            threads=threads,
        )
    inner = instantiate(config)
    wrapper = DeadlineExpertEnvironment if isinstance(inner, ScriptedExpert) else DeadlineEnvironment
    return wrapper(
        inner,
        family=name,
        reset_deadline_s=config.reset_deadline_s,
        step_deadline_s=config.step_deadline_s,
        threads=threads,
        step=None if together is None else together.step_of(inner),
    )


def instantiate(config: FamilyConfig) -> Any:
    """The bare environment, without deadlines. Raises as `make_environment`."""
    return instantiate_named(config.environment, config.arguments)


@functools.cache
def _shared_threads() -> DaemonThreads:
    # Stateless between calls, so runs in one process can share it without noticing each other.
    return DaemonThreads()
