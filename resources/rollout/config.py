"""How rollouts are paced, retried, evicted and watched."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from resources.rollout.cross_policy import CrossPolicyConfig

Pipeline = Literal["asynchronous", "synchronous", "one_off"]
StalePolicy = Literal["evict", "finish_masked"]
MemberFailurePolicy = Literal["fail_fast", "retry", "minimum_group"]


class RolloutConfig(BaseModel):
    """The rollout service of a run: staleness bound, failure policies, deadlines."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    pipeline: Pipeline = "asynchronous"
    """``synchronous``: no generation starts between "batch complete" and "new weights loaded" (max_staleness 0).
    ``asynchronous``: rollouts go on while the learner trains (max_staleness >= 1). ``one_off``: while the learner
    trains on a batch, the whole next one is generated under the weights loaded before, and the load waits for it
    (max_staleness 1)."""
    max_staleness: int = Field(default=1, ge=0)
    """Largest allowed learner's version minus oldest sampled version of a trained trajectory, in versions; with
    ``cross_policy`` larger by ``refresh_every - 1``."""
    stale_policy: StalePolicy = "evict"
    """What happens to a group beyond the bound. ``evict``: cancelled whole, prompt and seed issued again.
    ``finish_masked``: it goes on, its tokens beyond the bound are masked in the loss, its rewards count."""
    max_reissues: int = Field(default=2, ge=0)
    """How often one prompt may be issued again (after eviction or failure) before it is dropped."""
    member_failure: MemberFailurePolicy = "minimum_group"
    """``fail_fast``: one failed member drops its group. ``retry``: a failed member is played again, and drops the
    group when its retries are used up. ``minimum_group``: as retry, but the group is used when enough members are
    scored."""
    max_member_retries: int = Field(default=2, ge=0)
    """How often a failed member is played again."""
    minimum_group: int = Field(default=2, ge=1)
    """Scored members with which a group is used under ``member_failure: minimum_group``."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal (no signal) by new prompts instead of handing them to the learner."""
    max_replaced_groups: int = Field(default=64, ge=1)
    """Groups without signal that one family may replace for one batch; beyond it the run ends with that cause."""
    max_failed_groups: int | None = Field(default=None, ge=1)
    """Groups that one family may lose to failures (of environments, engines, scorers, workers) for one batch; beyond it
    the run ends with that cause. null: an outage is waited out, as long as ``stall_limit_s`` allows."""
    max_stale_groups: int | None = Field(default=None, ge=1)
    """Groups beyond the staleness bound that one family may lose for one batch; beyond it the run ends with that cause.
    null: they are issued again, and counted."""
    share_window: int | None = Field(default=None, ge=2)
    """Batches over which every family's ``groups_per_iteration`` hold, up to ``share_slack`` groups: a batch goes when
    its total is there, and a late family gets what it missed later. null: every batch holds them exactly, and waits."""
    share_slack: int = Field(default=1, ge=1)
    """Groups by which a family may be late, or ahead, within ``share_window``; no batch lacks a family altogether."""
    curriculum: str | None = None
    """Which prompts of a pool (``num_prompts``) are played, and how shares move, by success so far:
    ``informative_prompts`` (leaves out solved and hopeless ones), or an import path ``package.module:Class``."""
    curriculum_arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the curriculum."""
    deterministic: bool = False
    """The same seed gives the same trajectories and batches, bit by bit, however many rollout workers play and however
    long anything takes: every batch is generated whole under one version, ``max_staleness`` before its own, and a
    failed member is played again with its seed. Needs ``engine.batch_invariant``; a run's ``deterministic`` sets
    both."""
    stepping: Literal["trajectory", "batch"] = "trajectory"
    """``trajectory``: each takes its turns when it can. ``batch``: those of one rollout worker take theirs together,
    each generation waiting for all observations and each step for all generations; a baseline to measure against."""
    cross_policy: CrossPolicyConfig | None = None
    """Turns sampled under older versions, on engines that are kept behind for it. null: every turn is a current
    engine's. Needs ``pipeline: asynchronous``."""
    length_finish: Literal["end_episode", "step"] = "end_episode"
    """A turn that ran into ``max_new_tokens``: end the episode there (truncated), or give the cut text to the
    environment and go on."""
    history: Literal["append", "template"] = "append"
    """What a trajectory reads at its next turn. ``append``: everything that was sampled and read, as it was, whatever
    the chat template would now make of it. ``template``: the chat template over the whole conversation; where it
    rewrites what was said before (drops reasoning of earlier turns, say), a new token sequence begins. The trajectory
    then gives several rows to train on, each sampled token in one of them, and counts once in its group."""

    max_concurrent_trajectories: int = Field(default=512, ge=1)
    """Trajectories that one rollout worker plays at once."""
    retry_backoff_s: float = Field(default=0.2, ge=0)
    """Pause before a failed member is played again; doubles with each failure in a row of its family, up to 10 s."""
    breaker_failures: int = Field(default=16, ge=1)
    """After so many failures in a row in one family its circuit breaker opens: nothing of it starts until a pause is
    over, then one trajectory at a time, until one ends well. The pause starts at ``retry_backoff_s`` and doubles, up to
    10 s."""
    never_worked_limit_s: float = Field(default=180.0, gt=0)
    """A family whose breaker is open and none of whose trajectories ever ended well ends the wait for a batch after so
    many seconds: that is no outage."""
    worker_timeout_s: float = Field(default=5.0, gt=0)
    """A rollout worker not heard of for this long is lost: its trajectories are played again elsewhere."""
    exchange_wait_s: float = Field(default=1.0, gt=0)
    """Longest stay of a worker's long poll at the group queue, in seconds; well below ``worker_timeout_s``."""
    queue_gone_limit_s: float = Field(default=60.0, gt=0)
    """A rollout worker that cannot reach the group queue for this long ends: its run is gone. In seconds."""
    max_abandoned_calls: int = Field(default=32, ge=0)
    """Blocking environment calls that missed their deadlines and never returned: with more of them a rollout worker
    takes no new work, hands back what it plays, and its process is replaced. Of 64 threads each holds one."""
    loop_block_after_s: float = Field(default=2.0, gt=0)
    """A rollout worker whose event loop stands still for so long tells the group queue which environment blocks it."""
    loop_block_limit_s: float = Field(default=15.0, gt=0)
    """A rollout worker whose event loop stands still for so long is replaced, in seconds."""
    done_window_s: float = Field(default=0.005, ge=0)
    """Finished trajectories of so many seconds share one report to the group queue."""

    generate_deadline_s: float = Field(default=120.0, gt=0)
    """Longest time one generation may take on one engine, suspensions not counted, in seconds."""
    suspend_limit_s: float = Field(default=600.0, gt=0)
    """Longest suspension of an engine that a waiting request outlives, in seconds."""
    max_engine_attempts: int = Field(default=3, ge=1)
    """Engines that one generation is tried on before it fails."""
    engine_wait_s: float = Field(default=60.0, gt=0)
    """Longest wait for any usable engine when all are lost, in seconds."""
    engine_cooldown_s: float = Field(default=5.0, ge=0)
    """A failed engine is tried again after this pause, in seconds."""
    engine_poll_s: float = Field(default=2.0, gt=0)
    """Longest stay of a proxy's long poll at an engine, in seconds."""
    exchange_deadline_s: float = Field(default=30.0, gt=0)
    """Longest time an engine or the queue may take to answer beyond the stay asked for, in seconds."""

    close_deadline_s: float = Field(default=10.0, gt=0)
    """Longest time an environment's `close` may take, in seconds."""
    score_window_s: float = Field(default=0.05, ge=0)
    """Scoring requests of so many seconds share one file of the reward queue."""
    reward_poll_s: float = Field(default=0.05, gt=0)
    """Period at which the group queue looks for reward results, while any are awaited."""
    score_grace_s: float = Field(default=60.0, ge=0)
    """Time a score may take beyond the family's ``score_deadline_s`` (replica start, backlog), in seconds."""
    seal_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    """Size at which a trajectory file is sealed, in bytes."""
    seal_after_s: float = Field(default=0.2, gt=0)
    """Age at which a trajectory file is sealed, in seconds."""
    stall_after_s: float = Field(default=30.0, gt=0)
    """When nothing was scored for this long, the wait for a batch names what is missing in the log."""
    stall_limit_s: float = Field(default=600.0, gt=0)
    """When nothing was scored for this long, the wait for a batch ends with that message."""

    @model_validator(mode="after")
    def _pipeline_and_bound_agree(self) -> RolloutConfig:
        if self.pipeline == "synchronous" and self.max_staleness != 0:
            raise ValueError(
                f"rollout.pipeline is 'synchronous', which allows only max_staleness 0, not {self.max_staleness}; "
                "set rollout.max_staleness to 0, or rollout.pipeline to 'asynchronous'"
            )
        if self.pipeline == "asynchronous" and self.max_staleness == 0:
            raise ValueError(
                "rollout.max_staleness is 0, which is the synchronous pipeline, but rollout.pipeline is "
                "'asynchronous'; set rollout.pipeline to 'synchronous', or rollout.max_staleness to 1 or more"
            )
        if self.pipeline == "one_off" and self.max_staleness != 1:
            raise ValueError(
                f"rollout.pipeline is 'one_off', in which every batch but the first is exactly one version old, and "
                f"rollout.max_staleness is {self.max_staleness}; set it to 1, or choose another rollout.pipeline"
            )
        return self

    @property
    def lag_bound(self) -> int:
        """Largest lag of a trained token, in versions: what eviction and the learner's mask judge by."""
        return self.max_staleness + (0 if self.cross_policy is None else self.cross_policy.most_behind)

    @model_validator(mode="after")
    def _stale_turns_may_be_trained(self) -> RolloutConfig:
        if self.cross_policy is None:
            return self
        if self.deterministic or self.pipeline != "asynchronous":
            field = "deterministic is true" if self.deterministic else f"pipeline is {self.pipeline!r}"
            raise ValueError(
                f"rollout.cross_policy is set, but rollout.{field}, where every batch is sampled under one version "
                f"(rollout.max_staleness is {self.max_staleness}); set rollout.cross_policy to null, or "
                "rollout.pipeline to 'asynchronous' with a max_staleness of 1 or more and deterministic to false"
            )
        return self

    @model_validator(mode="after")
    def _late_groups_may_be_trained(self) -> RolloutConfig:
        if self.share_window is not None and self.max_staleness == 0:
            raise ValueError(
                f"rollout.share_window is {self.share_window}, but rollout.max_staleness is 0: a group that is late "
                "for its batch is too old for the next one; set rollout.share_window to null, or rollout.max_staleness "
                "to 1 or more"
            )
        return self

    @model_validator(mode="after")
    def _batches_of_a_schedule_are_exact(self) -> RolloutConfig:
        scheduled = (
            "deterministic" if self.deterministic else "pipeline one_off" if self.pipeline == "one_off" else None
        )
        if scheduled is not None and self.share_window is not None:
            raise ValueError(
                f"rollout.share_window is {self.share_window}, but with rollout.{scheduled} every batch is generated "
                "for itself and waits for all its groups; set rollout.share_window to null"
            )
        if self.deterministic and self.curriculum is not None:
            raise ValueError(
                f"rollout.curriculum is {self.curriculum!r}, which chooses prompts by the successes known at the "
                "moment; a deterministic run cannot: set rollout.curriculum to null, or deterministic to false"
            )
        return self

    @model_validator(mode="after")
    def _waits_fit_together(self) -> RolloutConfig:
        if self.exchange_wait_s * 2 > self.worker_timeout_s:
            raise ValueError(
                f"rollout.exchange_wait_s ({self.exchange_wait_s}) must be at most half of rollout.worker_timeout_s "
                f"({self.worker_timeout_s}), or live workers would be taken for lost"
            )
        if self.stall_limit_s < self.stall_after_s:
            raise ValueError(
                f"rollout.stall_limit_s ({self.stall_limit_s}) must not be below rollout.stall_after_s "
                f"({self.stall_after_s})"
            )
        return self
