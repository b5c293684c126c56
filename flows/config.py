"""`RunConfig`: the one parameter of `train`, composed from what the rooms define beside what they configure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from resources.engines.config import EngineConfig
from resources.environments.family import FamilyConfig
from resources.environments.registry import quickstart_families
from resources.hardware import PoolsConfig
from resources.policy.config import PolicyConfig
from resources.recovery.config import RecoveryConfig
from resources.rewards.config import RewardsConfig
from resources.rollout.config import RolloutConfig
from resources.state_dir import state_dir
from tasks.training.config import TrainingConfig
from tasks.warm_start.config import WarmStartConfig


def default_store() -> str:
    """The project's own store, in its state folder."""
    return str(state_dir() / "store")


class EvaluationConfig(BaseModel):
    """Held-out success of a policy version, sampled with the family's own sampling parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    num_episodes: int = Field(default=256, ge=1)
    """Episodes of each family in the evaluations before and after training."""
    every: int = Field(default=0, ge=0)
    """Evaluate after every so many iterations as well; 0: only before and after."""
    before: bool = True
    """Evaluate the policy that training starts from."""
    after: bool = True
    """Evaluate the last version."""
    greedy: bool = False
    """Take the most likely token instead of sampling."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Longest time one evaluation may take, in seconds."""


class RunConfig(BaseModel):
    """One training run. Unknown keys are errors; every field has a default that suits one small machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    name: str = "quickstart"
    """Prefix of the run's id: 1 to 40 of a-z, 0-9 and '-'."""
    seed: int = Field(default=0, ge=0)
    """Seeds weights, prompts and sampling."""
    store: str = Field(default_factory=default_store)
    """Object store of the run: a folder (made absolute) or ``s3://bucket/prefix``."""
    deterministic: bool = False
    """The same seed gives the same trajectories, batches and weights, bit by bit (docs/determinism.md): sets
    ``rollout.deterministic`` and ``engine.batch_invariant``."""
    num_iterations: int = Field(default=40, ge=1)
    """Iterations in all; a resumed run goes on up to this number."""
    iteration_timeout_s: float = Field(default=900.0, gt=0)
    """An iteration whose batch is not complete after this many seconds ends the run, saying what is missing."""
    families: dict[str, FamilyConfig] = Field(default_factory=quickstart_families, min_length=1)
    """Task families by name."""
    policy: PolicyConfig = PolicyConfig()
    """The model that is trained."""
    warm_start: WarmStartConfig | None = WarmStartConfig()
    """Short supervised training on scripted experts before RL; null: start from the model as it is."""
    pools: PoolsConfig = PoolsConfig()
    """Dask worker pools by hardware class."""
    engine: EngineConfig = EngineConfig()
    """Generation engines."""
    rollout: RolloutConfig = RolloutConfig()
    """Pipeline, staleness bound and failure policies."""
    training: TrainingConfig = TrainingConfig()
    """Algorithm and optimizer."""
    rewards: RewardsConfig = RewardsConfig()
    """Elastic reward pool."""
    recovery: RecoveryConfig = RecoveryConfig()
    """How far the run goes to save itself when its processes die."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    checkpoint_keep: int = Field(default=2, ge=1)
    """Learner checkpoints and weight versions kept beside those still in use."""

    @model_validator(mode="before")
    @classmethod
    def _deterministic_in_all_rooms(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("deterministic") is not True:
            return data
        return {
            **data,
            "rollout": _with_field(data.get("rollout"), "deterministic"),
            "engine": _with_field(data.get("engine"), "batch_invariant"),
        }

    @field_validator("store")
    @classmethod
    def _store_is_absolute(cls, value: str) -> str:
        # A deployment runs in a temporary working directory, so a relative path would name another place there.
        return value if "://" in value else str(Path(value).expanduser().absolute())

    @model_validator(mode="after")
    def _families_fit_the_pools(self) -> RunConfig:
        engine_classes = self.pools.of_role("engine")
        for name, family in self.families.items():
            if family.hardware_class not in engine_classes:
                raise ValueError(
                    f"families.{name}.hardware_class is {family.hardware_class!r}, which no engine pool provides; "
                    f"allowed: {engine_classes}. Change it, or add the class to pools.classes with role 'engine'"
                )
        if self.warm_start is None and self.policy.model_directory is None:
            raise ValueError(
                "warm_start is null and policy.model_directory is not given: RL cannot start from an untrained policy "
                "(no episode succeeds); give a model directory, or leave warm_start out for its defaults"
            )
        return self


def _with_field(section: Any, name: str) -> Any:
    """A section of a configuration, given or not, with a switch on."""
    if isinstance(section, BaseModel):
        return section.model_copy(update={name: True})
    return {**(section or {}), name: True}


def read_value(text: str) -> Any:
    """A value as written on the command line, read as YAML (``3``, ``0.1``, ``true``, ``[a, b]``, ``null``, text).

    Raises ValueError for what YAML cannot read.
    """
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{text!r} cannot be read as YAML ({_one_line(error)}); quote text, close brackets") from error
    if isinstance(value, str):
        # YAML 1.1 reads 3e-4 as text; every user means a number.
        try:
            return float(value)
        except ValueError:
            return value
    return value


def with_overrides(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """A configuration with dotted keys replaced (``{"training.optimizer.learning_rate": 1e-3}``), validated as a whole.

    Values that are text are read as `read_value` reads them. Raises ValueError for a key that does not exist.
    """
    if not overrides:
        return config
    data = config.model_dump(mode="json")
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        place: Any = data
        for depth, part in enumerate(parents):
            if not isinstance(place, dict) or part not in place:
                known = sorted(place) if isinstance(place, dict) else []
                raise ValueError(
                    f"override {dotted!r}: {'.'.join(parents[: depth + 1])!r} does not exist; known: {known}"
                )
            if place[part] is None:
                place[part] = {}
            place = place[part]
        if not isinstance(place, dict):
            raise ValueError(f"override {dotted!r}: {'.'.join(parents)!r} is a value, not a section")
        try:
            place[last] = read_value(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"override {dotted!r}: {error}") from error
    return RunConfig.model_validate(data)


def load_run_file(path: str | Path) -> RunConfig:
    """Read a YAML run file. Raises ValueError naming the file when it is missing, no YAML, or no mapping."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"run file {path} does not exist; an example is examples/quickstart/run.yaml")
    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"run file {path} is not YAML: {_one_line(error)}") from error
    if data is not None and not isinstance(data, dict):
        raise ValueError(f"run file {path} holds a {type(data).__name__}; it must be a mapping of RunConfig's fields")
    return RunConfig.model_validate(data or {})


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
