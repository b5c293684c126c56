"""Before anything expensive starts: is what the user gave usable, and which run is this?"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flows.combinations import check_combinations
from flows.config import RunConfig, with_overrides
from resources.environments.registry import make_environment
from resources.object_store import ObjectStore
from resources.policy.directory import check_policy_directory, read_model_config
from resources.policy.tokenizer_only import check_tokenizer_directory
from resources.rewards.liveness import RUN_DRIVER, RunHeartbeat, has_driver
from resources.rewards.scorers.registry import resolve_scorer
from resources.runs import (
    ResumePoint,
    RunRef,
    checkpoint_prefix,
    checkpoint_versions,
    claim_resume,
    create_run,
    find_run,
    iterations,
    new_run_id,
    num_resumes,
    resume_point,
)
from resources.trajectories.batch import batch_key, batch_versions
from tasks.training.requirements import check_own_parts

MUST_MATCH = ("seed", "families", "policy", "warm_start")
"""What a resumed run keeps: other data or another model would be another run."""


def composed(config: RunConfig, overrides: Mapping[str, Any] | None) -> RunConfig:
    """The configuration with its overrides, checked. Raises ValueError, naming the field."""
    config = with_overrides(config, overrides or {})
    check_inputs(config)
    return config


def check_inputs(config: RunConfig) -> None:
    """Raises ValueError, naming the field, for what cannot work: store, model directory, environments, scorers,
    and settings that do not go together."""
    ObjectStore.open(config.store).check_writable()
    if config.policy.model_directory is not None:
        is_computed = config.training.backend != "simulated" or config.warm_start is not None
        check = check_policy_directory if is_computed else check_tokenizer_directory
        check(config.policy.model_directory)
    for name, family in config.families.items():
        try:
            make_environment(family)
            resolve_scorer(family.scorer, family.scorer_arguments)
        except ValueError as error:
            raise ValueError(f"families.{name}: {error}") from error
    check_combinations(config)
    check_own_parts(config.training, config.families)
    _check_reference(config)


def _check_reference(config: RunConfig) -> None:
    """The reference scores the policy's own ids."""
    reference = config.training.reference
    if reference is None or reference.model_directory is None:
        return
    where, of_policy = "training.reference.model_directory", config.policy.model_directory
    try:
        size = read_model_config(reference.model_directory).get("vocab_size")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    expected = None if of_policy is None else read_model_config(of_policy).get("vocab_size")
    if None not in (size, expected) and size != expected:
        raise ValueError(
            f"{where} is {reference.model_directory!r}, whose vocabulary holds {size} tokens, and that of "
            f"policy.model_directory {expected}; give a model with the policy's tokenizer"
        )


def needs_reward_pool(config: RunConfig) -> bool:
    """Whether any family is judged on the reward pool."""
    return any(resolve_scorer(f.scorer, f.scorer_arguments).runs == "pool" for f in config.families.values())


@contextmanager
def open_run(config: RunConfig, resume: str | None) -> Iterator[tuple[RunRef, ResumePoint | None]]:
    """A new run, or an existing one and where it goes on. Gives the driver's sign of life while the block lasts.

    Raises ValueError when the run to resume is not there, is of another configuration, is running, or has nothing left
    to do.
    """
    if resume is None:
        run, life = RunRef(run_id=new_run_id(config.name), store_url=config.store), 0
        create_run(run, config.model_dump(mode="json"))
    else:
        run = check_resume(config, resume)
        life = _claim_next_life(run)
    facts = {"life": life, "host": socket.gethostname(), "pid": os.getpid()}
    with RunHeartbeat(run.root(), run.run_id, config.rewards.heartbeat_s, key=RUN_DRIVER, facts=facts):
        point = None
        if resume is not None:
            point = resume_point(run)
            _forget_unrecorded_batches(run, point.version if point else 0)
        yield run, point


def _claim_next_life(run: RunRef) -> int:
    """The number of the life that this driver may lead. At most one driver gets it, and only when the one before is
    gone. Raises ValueError otherwise."""
    newest = num_resumes(run)
    _check_nobody_runs_it(run, newest)
    if not claim_resume(run, newest + 1):
        raise ValueError(
            f"run {run.run_id} is being resumed by another driver since a moment ago; wait for its end, or stop it, "
            "before it is resumed again"
        )
    return newest + 1


def check_resume(config: RunConfig, resume: str) -> RunRef:
    """The run to resume. Raises ValueError as `open_run`, and changes nothing."""
    run = find_run(config.store, resume)
    _check_same(run, config.model_dump(mode="json"), run.folder().get_json("config.json"))
    done = iterations(run)
    if done and done[-1] + 1 >= config.num_iterations + (not _is_summed_up(run, done[-1] + 1)):
        raise ValueError(
            f"run {run.run_id} has {done[-1] + 1} iterations and num_iterations is {config.num_iterations}: nothing is "
            f"left to do; for 60 more set num_iterations to {done[-1] + 61}"
        )
    return run


def _is_summed_up(run: RunRef, num_iterations: int) -> bool:
    """Whether the run came to its end: one that was killed in its last evaluation has something left to do."""
    folder = run.folder()
    return folder.exists("summary.json") and folder.get_json("summary.json")["num_iterations"] == num_iterations


def _check_nobody_runs_it(run: RunRef, life: int) -> None:
    period_s = RunConfig.model_validate(run.folder().get_json("config.json")).rewards.heartbeat_s
    if has_driver(run.root(), run.run_id, life, period_s):
        raise ValueError(
            f"run {run.run_id} is running: its sign of life {run.folder().uri(RUN_DRIVER)} changes; wait for its "
            "end, or stop it, before it is resumed"
        )


def _forget_unrecorded_batches(run: RunRef, version: int) -> None:
    """A batch whose iteration was never recorded changed no weights that the resume starts from: its groups are in the
    queue's state still, and the batch is taken anew."""
    for taken in batch_versions(run.root(), run.run_id):
        if taken >= version:
            run.root().delete(batch_key(run.run_id, taken))
    # Nor may a learner that is rebuilt later find a checkpoint that this life of the run has not written.
    for written in checkpoint_versions(run):
        if written > version:
            for key in run.folder().list(checkpoint_prefix(written)):
                run.folder().delete(key)


def _check_same(run: RunRef, new: dict[str, Any], old: dict[str, Any]) -> None:
    for field in MUST_MATCH:
        if new[field] != old.get(field):
            raise ValueError(
                f"run {run.run_id} cannot be resumed with another {field}: it was started with "
                f"{old.get(field)!r}, now it is {new[field]!r}; leave {field} as it was, or start a new run"
            )
