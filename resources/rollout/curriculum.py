"""Which prompts are worth playing, and how much of each family? A curriculum answers from success so far.

A curriculum is pure: the same history gives the same answers. What it learns from is kept, and saved for a resume, by
the gate, so a class of your own needs no state: implement `Curriculum` and name it in ``rollout.curriculum``
(``package.module:Class``, constructed with ``rollout.curriculum_arguments``).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Protocol

MEMORY_GROUPS = 16
"""Groups over which a success rate forgets: up to so many it is their mean, then an exponential mean."""


@dataclass(frozen=True, slots=True)
class SuccessRecord:
    """Running success of a prompt, or of a family. A group counts by the share of its scored members that succeeded (by
    the verdict; without one, a reward above 0 is a success)."""

    num_groups: int = 0
    success_rate: float = 0.0

    def after(self, success: float) -> SuccessRecord:
        """With one more group."""
        number = self.num_groups + 1
        return SuccessRecord(number, self.success_rate + (success - self.success_rate) / min(number, MEMORY_GROUPS))

    def as_json(self) -> list[Any]:
        return list(astuple(self))


class Curriculum(Protocol):
    def quotas(
        self, batch: int, configured: Mapping[str, int], success: Mapping[str, SuccessRecord]
    ) -> Mapping[str, int]:
        """Groups of each family in batch ``batch``: at least one each, and as many in all as configured. Asked once,
        when the first group of that batch may start; ``configured`` is ``groups_per_iteration`` of every family."""
        ...

    def plays(self, family: str, prompt: int, record: SuccessRecord, epoch: int) -> bool:
        """Whether a prompt of a family's pool (``num_prompts``) is played in this epoch. Asked when it is drawn."""
        ...


class InformativePrompts:
    """Leaves out prompts that are solved and prompts that are hopeless: their groups have equal rewards and teach
    nothing. Both are played again every ``revisit_epochs`` epochs, since the policy moves. Shares stay as
    configured."""

    def __init__(
        self,
        solved_from: float = 0.95,
        hopeless_to: float = 0.0,
        min_groups: int = 2,
        revisit_epochs: int = 4,
    ) -> None:
        """
        Args:
            solved_from: success rate from which a prompt is solved.
            hopeless_to: success rate up to which it is hopeless.
            min_groups: scored groups before either is said.
            revisit_epochs: every so many epochs everything is played.
        """
        if not 0.0 <= hopeless_to < solved_from <= 1.0:
            raise ValueError(
                f"hopeless_to ({hopeless_to}) and solved_from ({solved_from}) are success rates, 0 to 1, the first "
                "below the second"
            )
        if min_groups < 1 or revisit_epochs < 1:
            raise ValueError(f"min_groups ({min_groups}) and revisit_epochs ({revisit_epochs}) must be 1 or more")
        self._solved_from, self._hopeless_to = solved_from, hopeless_to
        self._min_groups, self._revisit_epochs = min_groups, revisit_epochs

    def quotas(
        self, batch: int, configured: Mapping[str, int], success: Mapping[str, SuccessRecord]
    ) -> Mapping[str, int]:
        return configured

    def plays(self, family: str, prompt: int, record: SuccessRecord, epoch: int) -> bool:
        if record.num_groups < self._min_groups or epoch % self._revisit_epochs == 0:
            return True
        return self._hopeless_to < record.success_rate < self._solved_from


BUILT_IN: dict[str, type] = {"informative_prompts": InformativePrompts}


def make_curriculum(name: str | None, arguments: Mapping[str, Any]) -> Curriculum | None:
    """The curriculum of a built-in name or an import path ``package.module:Class``; None for None.

    Raises ValueError for a name that leads nowhere, and for arguments that the class refuses.
    """
    if name is None:
        return None
    known = f"allowed are {', '.join(map(repr, BUILT_IN))} and import paths 'package.module:Class'"
    found: Any = BUILT_IN.get(name)
    if found is None:
        module, _, attribute = name.partition(":")
        if not attribute:
            raise ValueError(f"rollout.curriculum is {name!r}; {known}")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"rollout.curriculum is {name!r}, which cannot be imported ({error}); {known}") from error
    try:
        curriculum = found(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rollout.curriculum_arguments {dict(arguments)} do not suit {name!r}: {error}") from error
    for method in ("quotas", "plays"):
        if not callable(getattr(curriculum, method, None)):
            raise ValueError(f"rollout.curriculum {name!r} has no method {method!r}")
    return curriculum


def checked_quotas(
    curriculum: Curriculum, batch: int, configured: Mapping[str, int], success: Mapping[str, SuccessRecord]
) -> dict[str, int]:
    """A curriculum's quotas. Raises ValueError when they do not add up to what is configured, or leave a family out."""
    quotas, total = dict(curriculum.quotas(batch, configured, success)), sum(configured.values())
    if quotas.keys() != configured.keys() or min(quotas.values()) < 1 or sum(quotas.values()) != total:
        raise ValueError(
            f"{type(curriculum).__name__}.quotas gave {quotas} for batch {batch}; it must name every family with at "
            f"least 1 group, {total} in all (configured: {dict(configured)})"
        )
    return quotas
