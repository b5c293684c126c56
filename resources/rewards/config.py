"""The elastic reward pool: how much is claimed at once, how long a lease lasts, when replicas come and go."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RewardsConfig(BaseModel):
    """Queue, replicas and autoscaler of the reward pool."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    deployment: str = Field(default="serve-rewards/serverless", pattern=r"^[^/{}]+/[^/{}]+$")
    """Prefect deployment whose runs are reward replicas, as ``flow name/deployment name``."""
    work_pool: str = Field(default="rewards", pattern=r"^[^{}\s/]+$")
    """Prefect work pool that the deployment runs on (any type: process, docker, kubernetes, ...)."""

    min_replicas: int = Field(default=0, ge=0)
    """Replicas kept whether there is work or not."""
    max_replicas: int = Field(default=2, ge=1)
    """Replicas at most."""
    start_ahead: bool = False
    """Start one replica before there is work: with ``max_staleness`` 0 nothing else hides its cold start."""
    target_backlog_per_replica: int = Field(default=64, ge=1)
    """Unfinished scoring requests for which one replica is enough; more of them ask for more replicas."""
    scale_up_age_s: float = Field(default=2.0, ge=0)
    """Replicas are added to those that run only when a request has waited for more than this many seconds: a cold start
    takes several, and a short burst is over before it."""
    autoscale_period_s: float = Field(default=0.5, gt=0)
    """Seconds between two looks at the backlog."""
    launch_timeout_s: float = Field(default=60.0, gt=0)
    """A replica that was asked for and has not registered after this many seconds is no longer counted on."""

    keep_alive_s: float = Field(default=60.0, gt=0)
    """A replica ends after this many seconds without work."""
    max_lifetime_s: float = Field(default=3600.0, gt=0)
    """A replica ends after this many seconds in any case (it finishes what it holds)."""
    owner_timeout_s: float = Field(default=30.0, gt=0)
    """A replica ends when the run has given no sign of life for this many seconds."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between two signs of life, of the run and of a replica."""
    replica_timeout_s: float = Field(default=10.0, gt=0)
    """A replica without a sign of life for this many seconds no longer counts as running."""

    scorer_processes: int = Field(default=1, ge=1)
    """Scorings that one replica runs at once, each in a process of its own that can be killed."""
    scorer_start_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time, in seconds, for a scorer process to start."""
    lease_s: float = Field(default=10.0, gt=0)
    """A claimed batch goes to another replica when its lease was not renewed for this many seconds."""
    clock_skew_s: float = Field(default=2.0, ge=0)
    """Largest difference between the clocks of two replicas; a lease is stolen this much later. Correctness does not
    depend on it: a larger skew can only cause a batch to be scored twice, and the second result is ignored."""
    max_attempts: int = Field(default=3, ge=1)
    """Times a batch is claimed before it is given up: its trajectories are then unscored, never lost."""
    busy_poll_s: float = Field(default=0.02, gt=0)
    """Seconds between two looks at the queue right after there was work."""
    idle_poll_s: float = Field(default=0.25, gt=0)
    """Seconds between two looks at the queue after a longer time without work."""

    @model_validator(mode="after")
    def _times_fit_together(self) -> RewardsConfig:
        def refuse(field: str, rule: str, remedy: str) -> None:
            raise ValueError(f"rewards.{field} is {getattr(self, field)!r}; {rule}. {remedy}")

        if self.min_replicas > self.max_replicas:
            refuse("min_replicas", f"it must be at most max_replicas ({self.max_replicas})", "Lower it")
        if self.busy_poll_s > self.idle_poll_s:
            refuse("busy_poll_s", f"it must be at most idle_poll_s ({self.idle_poll_s})", "Lower it")
        if self.lease_s < 3 * self.idle_poll_s:
            refuse("lease_s", f"it must be at least 3 x idle_poll_s ({self.idle_poll_s})", "Raise it")
        if self.keep_alive_s <= self.idle_poll_s:
            refuse("keep_alive_s", f"it must be longer than idle_poll_s ({self.idle_poll_s})", "Raise it")
        if self.keep_alive_s > self.max_lifetime_s:
            refuse("keep_alive_s", f"it must be at most max_lifetime_s ({self.max_lifetime_s})", "Lower it")
        for field in ("owner_timeout_s", "replica_timeout_s"):
            if getattr(self, field) < 3 * self.heartbeat_s:
                refuse(field, f"it must be at least 3 x heartbeat_s ({self.heartbeat_s})", "Raise it, or beat faster")
        return self

    def keep_alive_warning(self, iteration_s: float) -> str | None:
        """What to tell the user when replicas would come and go with every iteration; None when all is well."""
        if self.keep_alive_s >= 2 * iteration_s:
            return None
        return (
            f"rewards.keep_alive_s is {self.keep_alive_s:g}, less than twice the measured iteration "
            f"({iteration_s:.1f} s): replicas may end between iterations and start cold again. "
            f"Raise it to {2 * iteration_s:.0f} or more"
        )
