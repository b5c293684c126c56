"""What can go wrong, as data: every failure names the boundary it crossed, and whether the policy caused it."""

from __future__ import annotations

from enum import StrEnum


class FailureClass(StrEnum):
    """Who caused the failure of a trajectory, a request or a score.

    Only ``POLICY`` failures are scored (with what the environment says). All others leave the trajectory *unscored*:
    it is retried, then dropped from the loss, from its group's baseline and from every denominator, never scored 0.
    """

    POLICY = "policy"
    """Malformed action, episode too long: the policy's own doing."""
    ENVIRONMENT = "environment"
    """The environment raised, or missed its deadline."""
    ENGINE = "engine"
    """The engine raised, was lost, or missed its deadline."""
    REWARD = "reward"
    """The scorer raised, or missed its deadline."""
    INFRASTRUCTURE = "infrastructure"
    """A worker, a store or the network failed."""
    CANCELLED = "cancelled"
    """Cancelled by the scheduler: evicted as stale, redundant, or the run ended."""

    @property
    def is_scored(self) -> bool:
        return self is FailureClass.POLICY


class RollartError(RuntimeError):
    """Base of the errors that this system raises at run time; carries the failure class it is recorded under."""

    failure_class: FailureClass = FailureClass.INFRASTRUCTURE


class EnvironmentFailure(RollartError):
    failure_class = FailureClass.ENVIRONMENT


class EngineFailure(RollartError):
    failure_class = FailureClass.ENGINE


class RewardFailure(RollartError):
    failure_class = FailureClass.REWARD


class InfrastructureFailure(RollartError):
    failure_class = FailureClass.INFRASTRUCTURE


class DeadlineExceeded(InfrastructureFailure):
    """A wait ran out of time. The message says what was waited for, and for how long."""
