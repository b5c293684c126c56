"""Which settings cannot work together? Each is valid by itself; together they would train on nothing, or never end."""

from __future__ import annotations

import re
from pathlib import Path

from flows.config import RunConfig
from flows.simulation import check_simulation
from resources.engines.base import SamplingParams
from resources.engines.config import check_sampling
from resources.environments.family import FamilyConfig
from resources.rollout.cross_policy import stale_members
from resources.rollout.curriculum import InformativePrompts, make_curriculum
from resources.rollout.policy_files import read_context_length
from tasks.training.plugins import GROUP_ESTIMATORS
from tasks.training.requirements import check_requirements

_FAMILY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_RESERVED_NAMES = ("mean",)
"""Keys of the summary beside the families."""
VERDICTS = {
    "frozen_lake": ("environment",),
    "guess_number": ("environment",),
    "calculator": ("exact_answer",),
    "code_repair": ("unit_tests",),
}
"""Who can judge each built-in environment: itself, or the scorer that its judgement is made for."""


def check_combinations(config: RunConfig) -> None:
    """Raises ValueError, naming the fields, their values and the remedy."""
    check_simulation(config)
    context_length = _context_length(config)
    for name, family in config.families.items():
        _check_name(name)
        _check_verdict(name, family)
        _check_signal(name, family, config)
        try:
            check_sampling(SamplingParams(family.temperature, family.top_p, family.top_k, family.max_new_tokens))
        except ValueError as error:
            raise ValueError(f"families.{name}: {error}") from error
        if family.max_new_tokens >= context_length:
            raise ValueError(
                f"families.{name}.max_new_tokens is {family.max_new_tokens}, and a trajectory has room for "
                f"{context_length} tokens in all; lower it, or raise engine.context_length (or policy.context_length)"
            )
    _check_curriculum(config)
    _check_training_families(config)
    _check_embedded_workers(config)
    _check_cross_policy(config)
    _check_determinism(config)


def _context_length(config: RunConfig) -> int:
    """Tokens of a trajectory, at most."""
    directory = config.policy.model_directory
    wanted = config.engine.context_length
    if config.engine.backend == "simulated" and wanted is not None:
        return wanted
    built_for = config.policy.context_length if directory is None else read_context_length(Path(directory))
    if wanted is not None and wanted > built_for:
        raise ValueError(
            f"engine.context_length is {wanted}, but the policy is built for {built_for} tokens; lower it"
            + (", or raise policy.context_length" if directory is None else ", or leave it out")
        )
    return wanted or built_for


def _check_name(name: str) -> None:
    if not _FAMILY_NAME.fullmatch(name) or name in _RESERVED_NAMES:
        raise ValueError(
            f"families has the name {name!r}; allowed are 1 to 64 letters, digits, '_', '.' and '-', starting with a "
            f"letter or digit, and not {', '.join(map(repr, _RESERVED_NAMES))}"
        )


def _check_verdict(name: str, family: FamilyConfig) -> None:
    """A scorer that gets nothing to judge leaves every trajectory unscored; an environment that leaves the verdict to a
    scorer, judged by itself, gives every trajectory the same 0."""
    fitting = VERDICTS.get(family.environment)
    if fitting is None or family.scorer in fitting or ":" in family.scorer:
        return
    raise ValueError(
        f"families.{name}.scorer is {family.scorer!r}, which cannot judge environment {family.environment!r}; "
        f"set it to {' or '.join(map(repr, fitting))}, or to a scorer of your own ('package.module:Class')"
    )


def _check_signal(name: str, family: FamilyConfig, config: RunConfig) -> None:
    own = config.training.families.get(name)
    where, advantage = "training.advantage", config.training.advantage
    if own is not None and own.advantage is not None:
        where, advantage = f"training.families.{name}.advantage", own.advantage
    if family.group_size < 2 and advantage.estimator in GROUP_ESTIMATORS:
        raise ValueError(
            f"families.{name}.group_size is {family.group_size}, but {where}.estimator {advantage.estimator!r} "
            "compares the members of a group with each other: nothing would ever be learned; set group_size to 2 or "
            "more"
        )


def _check_training_families(config: RunConfig) -> None:
    unknown = sorted(config.training.families.keys() - config.families.keys())
    if unknown:
        raise ValueError(
            f"training.families has the names {unknown}, which are no task families of the run; allowed: "
            f"{sorted(config.families)}. Correct the name, or add the family to families"
        )
    check_requirements(config.training, config.families)


def _check_curriculum(config: RunConfig) -> None:
    rollout = config.rollout
    curriculum = make_curriculum(rollout.curriculum, rollout.curriculum_arguments)
    if isinstance(curriculum, InformativePrompts) and all(f.num_prompts is None for f in config.families.values()):
        raise ValueError(
            f"rollout.curriculum is {rollout.curriculum!r}, which leaves prompts of a pool out, but no family has one; "
            "set families.<name>.num_prompts, or rollout.curriculum to null"
        )


def _check_embedded_workers(config: RunConfig) -> None:
    """A standing cluster says itself who is there; an embedded one has what is written here."""
    if config.pools.address is not None:
        return
    classes = config.pools.classes
    for name, hardware_class in classes.items():
        if not any(classes[each].num_workers for each in (name, *hardware_class.fallback)):
            raise ValueError(
                f"pools.classes.{name}.num_workers is 0 and no fallback of it has workers: nobody would do the work "
                f"of role {hardware_class.role!r}; set num_workers to 1 or more, or name a fallback that has workers"
            )


def _check_cross_policy(config: RunConfig) -> None:
    """Stale engines beside current ones, and a loss that knows who sampled a token."""
    cross_policy = config.rollout.cross_policy
    if cross_policy is None:
        return
    classes = config.pools.classes
    if config.pools.address is None:  # a standing cluster is asked when it is attached
        for name in sorted({family.hardware_class for family in config.families.values()}):
            serving = next(each for each in (name, *classes[name].fallback) if classes[each].num_workers)
            stale_members(cross_policy, serving, range(classes[serving].num_workers))
    if config.training.backend == "simulated":
        return
    for where, each in config.training.algorithms_of(config.families).items():
        corrections = [one.name for one in each.corrections if one.name != "staleness_mask" or not one.max_staleness]
        if not corrections and not each.loss.reads_behaviour:
            raise ValueError(
                f"rollout.cross_policy is set, but {where}.loss (name {each.loss.name!r}, ratio_to "
                f"{each.loss.ratio_to!r}) takes every token for the learner's own, and its corrections "
                f"{'leave older tokens as they are' if each.corrections else 'are empty'}: "
                "tokens of stale engines would count wrongly; set its ratio_to to 'behaviour' with a loss that has a "
                "ratio, or its corrections to [{name: truncated_weight}]"
            )


def _check_determinism(config: RunConfig) -> None:
    """What wins by being first, or computes differently elsewhere, cannot be the same twice."""
    if config.engine.batch_invariant and config.engine.backend != "local":
        raise ValueError(
            f"engine.batch_invariant is true, which engine.backend {config.engine.backend!r} cannot promise; set "
            "engine.backend to 'local', or engine.batch_invariant (and deterministic) to false"
        )
    if not config.rollout.deterministic:
        return
    if config.training.streamed:
        raise ValueError(
            "training.streamed is true, and rollout.deterministic too: gradients would be added up in the order in "
            "which groups happen to be scored, which rounds otherwise each time; set training.streamed to false, or "
            "deterministic"
        )
    if not config.engine.batch_invariant:
        raise ValueError(
            "rollout.deterministic is true and engine.batch_invariant is false: log-probabilities would depend on "
            "which requests happen to share a batch; set engine.batch_invariant to true, or deterministic for both"
        )
    for name, family in config.families.items():
        for field in ("redundant_groups", "redundant_members"):
            if number := getattr(family, field):
                raise ValueError(
                    f"families.{name}.{field} is {number}, and a deterministic run cannot let the first ones win; set "
                    f"it to 0, or deterministic to false"
                )
    classes = config.pools.classes
    for name, hardware_class in classes.items():
        for other in hardware_class.fallback:
            if hardware_class.role == "engine" and classes[other].device != hardware_class.device:
                raise ValueError(
                    f"pools.classes.{name}.fallback names {other!r}, whose device is {classes[other].device!r}, not "
                    f"{hardware_class.device!r}: a deterministic run cannot generate there instead, since other "
                    "devices round otherwise; leave the fallback out, or set deterministic to false"
                )
