"""Cross-policy sampling: which turns of a trajectory does a stale engine sample, and how old can its version be?

Within one training trajectory each action comes from the current engines or, drawn anew for every turn, from *stale*
ones, which load only every ``refresh_every``-th version (AgentRL, arXiv 2510.04206, cross-policy sampling). Every token
carries the version and the log-probability of the engine that sampled it, so the importance ratio of each is exact.
docs/staleness.md argues what becomes of the staleness bound. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from resources.environments.seeds import turn_draw
from resources.rollout.messages import Split

Member = TypeVar("Member")


class CrossPolicyConfig(BaseModel):
    """Some turns of every training trajectory are sampled under an older version, on engines kept behind for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    p_stale: float = Field(gt=0, le=1)
    """Probability that a turn is sampled by a stale engine."""
    refresh_every: int = Field(ge=1)
    """A stale engine loads only the versions that this divides: it is up to ``refresh_every - 1`` versions behind."""
    stale_engines: int = Field(default=1, ge=1)
    """Engines of each hardware class with training trajectories that are stale; at least one more must be current."""

    @property
    def most_behind(self) -> int:
        """Versions that a stale engine can be behind the current ones, at most."""
        return self.refresh_every - 1

    def is_stale_turn(self, sampling_seed: int, turn: int) -> bool:
        """Whether turn number ``turn`` of the trajectory with this seed is a stale engine's.

        The seed follows from the run's, the group, the member and the attempt: the choice depends on no order of
        events, on no worker and on no other turn.
        """
        return turn_draw(sampling_seed, turn) < self.p_stale


def drawn_policy(
    config: CrossPolicyConfig | None, split: Split, sampling_seed: int, turn: int
) -> Literal["current", "stale"]:
    """The engines that turn number ``turn`` of the trajectory with this seed is meant for. Evaluation measures one
    version, that of the current ones."""
    if config is None or split != "train":
        return "current"
    return "stale" if config.is_stale_turn(sampling_seed, turn) else "current"


def stale_members(config: CrossPolicyConfig | None, hardware_class: str, engines: Sequence[Member]) -> Sequence[Member]:
    """The stale ones among the engines of a class that generates for training: the last ones.

    Raises ValueError when no current engine would be left.
    """
    if config is None:
        return ()
    if len(engines) <= config.stale_engines:
        raise ValueError(
            f"rollout.cross_policy.stale_engines is {config.stale_engines}, and hardware class {hardware_class!r}, "
            f"which generates for training, has {len(engines)} engines: at least one current engine must be left; give "
            f"the class {config.stale_engines + 1} workers or more (pools.classes.{hardware_class}.num_workers), or "
            "set rollout.cross_policy to null"
        )
    return engines[len(engines) - config.stale_engines :]
