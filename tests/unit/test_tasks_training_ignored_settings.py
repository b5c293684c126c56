"""A setting that was changed and that its algorithm does not read is refused, by name; what is read is let through."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import ValidationError

from tasks.training.config import TrainingConfig
from tasks.training.ignored_settings import READ_BY_CORRECTION, READ_BY_ESTIMATOR, READ_BY_LOSS
from tasks.training.plugins import CORRECTIONS, ESTIMATORS, LOSSES, resolve
from tasks.training.requirements import check_requirements

CHANGED: dict[str, Any] = {
    "scaling": "none", "epsilon": 0.5, "discount": 0.9, "gae_lambda": 0.5, "step_weight": 2.0,
    "component_weights": {"outcome": 2.0}, "arguments": {"size": 1},
    "ratio_to": "proximal", "proximal": "loglinear", "clip_low": 0.5, "clip_high": 0.5, "dual_clip": 3.0,
    "behaviour_weight_cap": 9.0, "behaviour_weight_level": "sequence_sum", "positive_above": 0.5,
    "quadratic_penalty": 0.5,
    "level": "sequence_mean", "low": 0.75, "high": 1.5, "max_staleness": 3, "second_moment": 0.5,
}  # fmt: skip
"""A value other than the default, of every setting."""
FOR_ALL = {"estimator", "normalisation", "name", "entropy_coefficient"}
SECTIONS = {
    "advantage": ("estimator", READ_BY_ESTIMATOR, ESTIMATORS),
    "loss": ("name", READ_BY_LOSS, LOSSES),
    "corrections": ("name", READ_BY_CORRECTION, CORRECTIONS),
}
CASES = [
    (section, algorithm, setting)
    for section, (_, table, _) in SECTIONS.items()
    for algorithm in table
    for setting in CHANGED
]


def training(section: str, algorithm: str, **settings: Any) -> dict[str, Any]:
    """A configuration that is right but for these settings of one section."""
    kind = SECTIONS[section][0]
    part = {kind: algorithm, **settings}
    if section == "corrections":
        # A weight wants a loss without a ratio to the behaviour policy.
        return {"corrections": [part], "loss": {"name": "policy_gradient"}}
    if section == "loss" and "proximal" in settings and algorithm != "decoupled":
        part["ratio_to"] = "proximal"
    return {section: part, **({"critic": {}} if algorithm == "gae" else {})}


def fields_of(section: str) -> set[str]:
    model = {"advantage": "AdvantageConfig", "loss": "LossConfig", "corrections": "CorrectionConfig"}[section]
    return set(getattr(inspect.getmodule(TrainingConfig), model).model_fields)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_algorithm_and_every_setting_is_in_the_table(section: str) -> None:
    _, table, built_in = SECTIONS[section]
    assert table.keys() == built_in.keys()
    assert fields_of(section) - FOR_ALL <= CHANGED.keys()
    assert {setting for settings in table.values() for setting in settings} <= fields_of(section)


@pytest.mark.parametrize(("section", "algorithm", "setting"), CASES)
def test_a_setting_is_read_or_refused(section: str, algorithm: str, setting: str) -> None:
    kind, table, _ = SECTIONS[section]
    if setting not in fields_of(section):
        return
    data = training(section, algorithm, **{setting: CHANGED[setting]})
    if setting in table[algorithm]:
        TrainingConfig.model_validate(data)
        return
    value = "'proximal'" if section == "loss" and "proximal" in setting else repr(CHANGED[setting])
    place = f"training.{section}" + (".0" if section == "corrections" else "")
    with pytest.raises(ValidationError) as refused:
        TrainingConfig.model_validate(data)
    told = str(refused.value)
    assert f"{place}.ratio_to is {value}" in told or f"{place}.{setting} is {value}" in told, told
    assert f"{place}.{kind} {algorithm!r} does not read; leave it out" in told


@pytest.mark.parametrize("section", SECTIONS)
def test_the_table_says_what_the_code_reads(section: str) -> None:
    """Every setting that the source of an algorithm names is in its row of the table."""
    _, table, built_in = SECTIONS[section]
    for algorithm, settings in table.items():
        cls = resolve("it", algorithm, built_in)
        source = "".join(inspect.getsource(base) for base in cls.__mro__ if base.__module__.startswith("tasks."))
        for setting in fields_of(section) - FOR_ALL:
            if f"config.{setting}" in source:
                assert setting in settings, (algorithm, setting)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"advantage": {"estimator": "gigpo", "scaling": "batch"}},
            r"scaling is 'batch', which estimator 'gigpo' does",
        ),
        ({"loss": {"proximal": "loglinear"}}, r"loss.proximal is 'loglinear', but its ratio_to is 'behaviour'"),
        ({"fixed_length_tokens": 64}, r"fixed_length_tokens is 64, which training.normaliser 'family_token_mean' does"),
        (
            {"reference": {"model_directory": "/a"}},
            r"reference.model_directory is '/a', but training.kl.coefficient is 0, .*; set the coefficient",
        ),
        (
            {"advantage": {"estimator": "gdpo"}, "kl": {"coefficient": 0.1, "place": "reward"}},
            r"kl.place is 'reward', but training.advantage.estimator is 'gdpo', .*set kl.place to 'loss'",
        ),
        (
            {
                "loss": {"name": "policy_gradient"},
                "corrections": [{"name": "truncated_weight"}, {"name": "masked_weight"}],
            },
            r"corrections has 'truncated_weight' and 'masked_weight', .* would be its square; keep one",
        ),
        ({"corrections": [{"name": "ratio_mask", "low": 7}]}, r"low 7.0 and high 5.0; .* the correction's own"),
        ({"corrections": [{"name": "ratio_mask", "high": 0.5}]}, r"low 0.5 and high 0.5; low must be below high"),
        (
            {"families": {"maze": {"loss": {"name": "gspo", "positive_above": 1.0}}}},
            r"training.families.maze.loss.positive_above is 1.0, which .* 'gspo' does not read; .*\(topr\)",
        ),
    ],
)
def test_what_nothing_would_read_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        TrainingConfig.model_validate(changes)


def test_settings_of_ones_own_are_ones_own() -> None:
    TrainingConfig.model_validate(
        {
            "advantage": {"estimator": "my.package:Estimator", "gae_lambda": 0.5, "arguments": {"size": 1}},
            "loss": {"name": "my.package:Loss", "dual_clip": 3.0, "proximal": "loglinear"},
            "corrections": [{"name": "my.package:Correction", "max_staleness": 2, "low": 0.1}],
            "reference": {"model_directory": "/a"},
        }
    )


def test_a_reference_that_the_runs_own_algorithm_reads_is_not_refused_for_a_family_without_one() -> None:
    config = TrainingConfig.model_validate(
        {
            "kl": {"coefficient": 0.1},
            "reference": {"model_directory": "/a"},
            "families": {"sums": {"kl": {"coefficient": 0.0}}},
        }
    )
    with pytest.raises(ValueError, match="nothing reads a reference"):
        check_requirements(config, ["sums"])
