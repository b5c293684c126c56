"""One RL iteration: RollArt's cycle (arXiv 2512.22560, section 6.2), turned so that the load follows the publication.

Who waits for whom. Rollouts are no stage: they go on beside all of this, under the gate of `resources/rollout`.

| stage          | on      | consumes              | waits for                         | unblocks                     |
|----------------|---------|-----------------------|-----------------------------------|------------------------------|
| collect        | control | scored groups         | rollouts and rewards of batch v   | update, and iteration v + 1  |
| stream         | learner | groups of batch v     | version v to be published         | update (`training.streamed`) |
| update         | learner | batch v               | version v to be published         | publish                      |
| publish        | learner | the learner's weights | the store; engines prefetch       | the switch, update v + 1     |
| switch-weights | control | version v + 1         | the end of iteration v - 1; a     | admission of batch v+1+alpha |
|                |         |                       | schedule's batches [1]; steps     |                              |
| record         | control | metrics, queue state  | nothing                           | a resume behind it           |
| evaluate       | control | held-out episodes     | their end: no load before it      | the end of the iteration [2] |

[1] One-off and deterministic runs: what is sampled under version v is complete (`resources.rollout.logical_time`).
[2] For which wait: the switch to v + 2, and the begin of iteration v + 2.

An asynchronous or one-off run plays two iterations at once: v + 1 begins when batch v is collected (`flows.turns`).
"""

from __future__ import annotations

import time
from typing import Any

from prefect import flow
from pydantic import BaseModel, ConfigDict

from flows.config import RunConfig
from flows.retries import run_stage, tolerate_loss
from flows.turns import turn_of
from resources.runs import RunRef
from tasks.evaluation.stage import evaluate_version
from tasks.record.stage import record
from tasks.rollout.stage import collect
from tasks.training.stage import stream, update
from tasks.weights.stage import publish, switch_weights

NUM_STAGES = 7
"""Stages of an iteration, at most, each with a deadline of its own."""


class IterationPlan(BaseModel):
    """What one iteration needs to know of the run's configuration."""

    model_config = ConfigDict(frozen=True)

    families: list[str]
    timeout_s: float
    """Deadline of each stage, in seconds."""
    streamed: bool = False
    """Whether the update begins while the batch fills."""
    checkpoint_keep: int = 2
    """Checkpoints and weight versions that are kept, at least."""
    evaluate_episodes: int = 0
    """Held-out episodes a family after this iteration; 0: none is due."""
    evaluate_seed: int = 0
    greedy: bool = False
    max_stage_retries: int = 0
    """How often a stage that lost its worker, or an actor that it called, is run again."""
    recovery_s: float = 0.0
    """Longest wait for lost actors to be rebuilt before that, in seconds."""

    @property
    def on_loss(self) -> dict[str, Any]:
        """For `run_stage`."""
        return {"retries": self.max_stage_retries, "recovery_s": self.recovery_s}

    @classmethod
    def of(cls, config: RunConfig, version: int) -> IterationPlan:
        """The plan of iteration ``version``."""
        evaluation = config.evaluation
        is_due = evaluation.every > 0 and (version + 1) % evaluation.every == 0 and version + 1 < config.num_iterations
        return cls(
            families=list(config.families),
            timeout_s=config.iteration_timeout_s,
            streamed=config.training.streamed,
            checkpoint_keep=config.checkpoint_keep,
            evaluate_episodes=evaluation.num_episodes if is_due else 0,
            evaluate_seed=config.seed,
            greedy=evaluation.greedy,
            max_stage_retries=config.recovery.max_stage_retries,
            recovery_s=config.recovery.replacement_wait_s + config.recovery.build_timeout_s,
        )


@flow(name="rl-iteration", flow_run_name="iteration-{version}", validate_parameters=False)
def rl_iteration(run: RunRef, version: int, plan: IterationPlan) -> dict[str, Any]:
    """Turn policy version ``version`` into ``version + 1``. Returns the iteration's metrics row.

    Runs on a `PoolTaskRunner`; the run's engines, queue and learner must be registered on its cluster. A stage that
    lost its worker is run again when its actors are rebuilt; one that fails otherwise fails the iteration, and the run
    can be resumed behind the last one that was recorded.
    """
    started = time.time()
    turn = turn_of(version)
    # 1. Block until the group queue holds batch v: complete, scored groups within the staleness bound.
    collecting = collect.submit(run, version, plan.timeout_s)
    streaming = None
    if plan.streamed:  # 2. begins with the groups that are there, as soon as the learner is free
        turn.wait_for_learner(plan.timeout_s)
        streaming = stream.submit(run, version, plan.timeout_s)
    batch = collecting.result()
    collected = time.time()
    turn.has_collected()
    # 2. Train on it, while rollouts go on under v.
    turn.wait_for_learner(plan.timeout_s)
    if streaming is not None:
        tolerate_loss(streaming)
    metrics = run_stage(update, run, version, plan.timeout_s, **plan.on_loss)
    # 3. Version v + 1 goes to the weight store; engines prefetch it while they still serve v.
    published = run_stage(publish, run, version + 1, plan.timeout_s, **plan.on_loss)
    turn.has_published()
    turn.wait_for_engines(plan.timeout_s)
    # 4., 5., 6. Suspend at the next decode step, load (a pointer swap), resume: running trajectories go on under v + 1.
    switched = run_stage(switch_weights, run, version + 1, plan.timeout_s, **plan.on_loss)
    # 7. Metrics, artifacts, manifest; then evaluate when due: the next load comes after it, so one version is measured.
    spent = {
        "time/started_at": started,
        "time/collect_s": max(0.0, collected - max(started, turn.learner_free_at)),
        "time/iteration_s": turn.lap(started),
    }
    row = {**batch, **metrics, **{f"weights/{k}": v for k, v in published.items()}, **switched, **spent}
    row = run_stage(record, run, version, row, plan.families, plan.checkpoint_keep, **plan.on_loss)
    if plan.evaluate_episodes:
        episodes = dict.fromkeys(plan.families, plan.evaluate_episodes)
        row["evaluation"] = evaluate_version.submit(
            run, version + 1, episodes, plan.evaluate_seed, plan.greedy, plan.timeout_s
        ).result()
    return row
