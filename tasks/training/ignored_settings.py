"""Which settings of a section does its algorithm read? One that was changed and is not read is a mistake: its author
believes in an algorithm that does not run.

Settings of a user's own estimator, loss or correction are that one's business.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from tasks.training.plugins import CORRECTIONS, ESTIMATORS, LOSSES

if TYPE_CHECKING:
    from pydantic import BaseModel

    from tasks.training.algorithm_config import AlgorithmSections, LossConfig

READ_BY_ESTIMATOR: Mapping[str, tuple[str, ...]] = {
    "grpo": ("scaling", "epsilon"),
    "rloo": (),
    "reinforce_plus_plus": (),
    "reinforce_plus_plus_baseline": (),
    "gdpo": ("epsilon", "component_weights"),
    "turn_returns": ("scaling", "epsilon", "discount"),
    "gigpo": ("scaling", "epsilon", "discount", "step_weight"),
    "gae": ("discount", "gae_lambda"),
}
"""Beside ``estimator`` and ``normalisation``, which are for all."""
_RATIO = ("ratio_to", "proximal", "clip_low", "clip_high")
READ_BY_LOSS: Mapping[str, tuple[str, ...]] = {
    "ppo_clip": (*_RATIO, "dual_clip"),
    "decoupled": (
        "proximal", "clip_low", "clip_high", "dual_clip", "behaviour_weight_cap", "behaviour_weight_level",
    ),
    "policy_gradient": ("ratio_to", "proximal"),
    "gspo": (*_RATIO, "dual_clip"),
    "cispo": _RATIO,
    "tis": _RATIO,
    "topr": (*_RATIO, "behaviour_weight_level", "positive_above"),
    "kimi": ("ratio_to", "proximal", "quadratic_penalty"),
}  # fmt: skip
"""Beside ``name`` and ``entropy_coefficient``, which are for all."""
_WEIGHT = ("level", "low", "high")
READ_BY_CORRECTION: Mapping[str, tuple[str, ...]] = {
    "truncated_weight": _WEIGHT,
    "masked_weight": _WEIGHT,
    "ratio_mask": _WEIGHT,
    "staleness_mask": ("max_staleness",),
    "m2po": ("second_moment",),
}
"""Beside ``name``."""


def check_nothing_ignored(where: str, sections: AlgorithmSections) -> None:
    """Raises ValueError, naming the setting, its value and the remedy.

    ``where``: of the sections, such as ``training`` or ``training.families.maze``.
    """
    advantage, loss, corrections, _ = sections
    if advantage.estimator in ESTIMATORS:
        if advantage.scaling == "batch" and advantage.estimator != "grpo":
            raise ValueError(
                f"{where}.advantage.scaling is 'batch', which estimator {advantage.estimator!r} does not know; leave "
                "it out, choose estimator 'grpo', or set normalisation to 'batch'"
            )
        _check(f"{where}.advantage", "estimator", advantage, ("normalisation",), READ_BY_ESTIMATOR)
    if loss.name in LOSSES:
        _check(f"{where}.loss", "name", loss, ("entropy_coefficient",), READ_BY_LOSS)
        _check_proximal(where, loss)
    for number, correction in enumerate(corrections):
        if correction.name in CORRECTIONS:
            _check(f"{where}.corrections.{number}", "name", correction, (), READ_BY_CORRECTION)


def _check(
    section: str, kind: str, config: BaseModel, by_all: Collection[str], read_by: Mapping[str, Collection[str]]
) -> None:
    name = getattr(config, kind)
    read = {kind, *by_all, *read_by[name]}
    for field, info in type(config).model_fields.items():
        value = getattr(config, field)
        if field in read or value == info.get_default(call_default_factory=True):
            continue
        readers = [other for other, fields in read_by.items() if field in fields]
        remedy = f"or choose one that does ({', '.join(readers)})" if readers else "or a class of your own reads it"
        raise ValueError(
            f"{section}.{field} is {value!r}, which {section}.{kind} {name!r} does not read; leave it out, {remedy}"
        )


def _check_proximal(where: str, loss: LossConfig) -> None:
    if loss.proximal == "loglinear" and loss.ratio_to == "behaviour" and loss.name != "decoupled":
        raise ValueError(
            f"{where}.loss.proximal is 'loglinear', but its ratio_to is 'behaviour', so loss {loss.name!r} reads no "
            "proximal policy; set ratio_to to 'proximal', or leave proximal out"
        )
