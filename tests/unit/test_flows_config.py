"""`RunConfig`: overrides, unknown keys, bad combinations."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from flows.config import RunConfig, load_run_file, read_value, with_overrides

ROOT = Path(__file__).resolve().parents[2]


def test_an_override_replaces_one_field_and_keeps_the_rest():
    config = with_overrides(RunConfig(seed=3), {"rollout.max_staleness": "2", "num_iterations": 5})
    assert (config.rollout.max_staleness, config.num_iterations, config.seed) == (2, 5, 3)


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("3e-4", 3e-4), ("true", True), ("null", None), ("[1, 2]", [1, 2]), ("abc", "abc")]
)
def test_values_are_read_as_people_mean_them(text, value):
    assert read_value(text) == value


def test_an_override_of_a_section_that_does_not_exist_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'traning' does not exist; known: .*training"):
        with_overrides(RunConfig(), {"traning.minibatches": 1})


def test_an_unknown_key_is_an_error():
    with pytest.raises(ValidationError, match="num_iteration\n.*Extra inputs are not permitted"):
        with_overrides(RunConfig(), {"num_iteration": 1})


@pytest.mark.parametrize(
    ("field", "text"),
    [("training.optimizer.max_grad_norm", ".inf"), ("training.advantage.component_weights", "{format: .nan}")],
)
def test_a_number_that_is_not_finite_is_an_error(field, text):
    with pytest.raises(ValidationError, match=rf"{field}[\s\S]*Input should be a finite number"):
        with_overrides(RunConfig(), {field: read_value(text)})


def test_every_section_refuses_unknown_keys_and_numbers_that_are_not_finite():
    left, seen = [RunConfig], set()
    while left:
        part = left.pop()
        left += get_args(part)
        if isinstance(part, type) and issubclass(part, BaseModel) and part not in seen:
            seen.add(part)
            left += [field.annotation for field in part.model_fields.values()]
    assert len(seen) > 20
    loose = {
        s.__name__ for s in seen if s.model_config.get("allow_inf_nan", True) or s.model_config["extra"] != "forbid"
    }
    assert not loose


def test_a_family_whose_class_nobody_provides_names_the_classes():
    message = r"families.frozen_lake.hardware_class is 'h100'.*allowed: \['compute', 'bandwidth'\]"
    with pytest.raises(ValidationError, match=message):
        with_overrides(RunConfig(), {"families.frozen_lake.hardware_class": "h100"})


def test_a_relative_store_is_made_absolute():
    assert Path(RunConfig(store="some/where").store).is_absolute()
    assert RunConfig(store="s3://bucket/prefix").store == "s3://bucket/prefix"


def test_staleness_and_pipeline_must_agree():
    with pytest.raises(ValidationError, match="synchronous"):
        with_overrides(RunConfig(), {"rollout.max_staleness": 0})


def test_the_quickstart_run_file_loads_and_a_missing_one_is_named(tmp_path):
    config = load_run_file(ROOT / "examples" / "quickstart" / "run.yaml")
    assert list(config.families) == ["frozen_lake", "code_repair", "calculator", "guess_number"]
    with pytest.raises(ValueError, match="does not exist"):
        load_run_file(tmp_path / "none.yaml")


def test_the_configuration_survives_json():
    config = RunConfig(seed=5)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
