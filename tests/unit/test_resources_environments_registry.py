"""Environments by name and by import path; every way to get it wrong has a message."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from resources.environments.base import Message, ScriptedExpert, StepOutcome
from resources.environments.deadline import DeadlineEnvironment
from resources.environments.family import FamilyConfig
from resources.environments.instances import BUILT_IN
from resources.environments.registry import make_environment, quickstart_families
from resources.environments.transcripts import noisy_expert_episode

HERE = __name__


class Minimal:
    """A user's environment with nothing optional: no close, no judgement, no expert."""

    env_version = "3"
    max_turns = 2

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting

    async def reset(self, seed: int) -> list[Message]:
        return [Message(role="user", content=f"{self.greeting} {seed}")]

    async def step(self, action: str) -> StepOutcome:
        return StepOutcome([], reward=1.0, terminated=True, success=True)


class WithoutStep:
    env_version = "1"
    max_turns = 1

    def reset(self, seed: int) -> list[Message]:
        return []


class WithoutVersion(Minimal):
    env_version: Any = None


class WithoutTurns(Minimal):
    max_turns: Any = 0


def wrapped(environment: object) -> DeadlineEnvironment:
    assert isinstance(environment, DeadlineEnvironment)
    return environment


class FailingConstructor(Minimal):
    def __init__(self) -> None:
        raise OSError("no data here")


def family(environment: str, **arguments: Any) -> FamilyConfig:
    return FamilyConfig.model_validate(
        {"environment": environment, "arguments": arguments, "hardware_class": "compute"}
    )


def test_an_import_path_with_arguments_makes_an_environment() -> None:
    environment = make_environment(family(f"{HERE}:Minimal", greeting="hi"))
    assert (environment.env_version, environment.max_turns) == ("3", 2)
    assert asyncio.run(environment.reset(4)) == [{"role": "user", "content": "hi 4"}]
    assert asyncio.run(environment.step("x")).success
    assert asyncio.run(wrapped(environment).judgement()) is None
    asyncio.run(environment.close())
    assert not isinstance(environment, ScriptedExpert)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_names_make_environments_with_experts(name: str) -> None:
    assert isinstance(make_environment(family(name)), ScriptedExpert)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            family("frozen_lkae"),
            "'frozen_lkae' is unknown; use one of calculator, code_repair, frozen_lake, guess_number",
        ),
        (family("module:"), "is unknown"),
        (family("no.such.module:Class"), "module 'no.such.module' does not import .*PYTHONPATH"),
        (family(f"{HERE}:Absent"), "has no class 'Absent'; it has .*'Minimal'"),
        (family(f"{HERE}:family"), "has no class 'family'"),
        (family(f"{HERE}:WithoutStep"), "has no method step; an environment has reset.seed. and step.action."),
        (family(f"{HERE}:WithoutVersion"), "has no env_version"),
        (family(f"{HERE}:WithoutTurns"), "max_turns is 0"),
        (family(f"{HERE}:FailingConstructor"), "no data here"),
        (family(f"{HERE}:Minimal", greting="hi"), "does not take the arguments .*greting.*; it takes .'greeting'."),
        (family("frozen_lake", size=1), "size is 1; it must be 2 to 16"),
    ],
)
def test_what_cannot_be_made_is_said_clearly(config: FamilyConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_environment(config)


def test_a_family_without_an_expert_has_no_transcripts() -> None:
    with pytest.raises(ValueError, match="has no scripted expert"):
        asyncio.run(noisy_expert_episode(family(f"{HERE}:Minimal"), 0, 0.5, random.Random(0)))


def test_a_pool_scorer_needs_a_judgement() -> None:
    config = quickstart_families()["guess_number"].model_copy(update={"scorer": "exact_answer"})
    with pytest.raises(
        ValueError, match="the scorer 'exact_answer' runs on the reward pool, but 'guess_number' has no"
    ):
        asyncio.run(noisy_expert_episode(config, 0, 0.0, random.Random(0)))


def test_the_quickstart_has_four_families_on_two_classes() -> None:
    families = quickstart_families()
    assert {
        name: (f.hardware_class, f.groups_per_iteration, f.group_size, f.scorer) for name, f in families.items()
    } == {
        "frozen_lake": ("compute", 6, 8, "environment"),
        "code_repair": ("compute", 4, 8, "unit_tests"),
        "calculator": ("bandwidth", 4, 8, "exact_answer"),
        "guess_number": ("bandwidth", 4, 8, "environment"),
    }


def test_the_registry_loads_neither_gymnasium_nor_torch() -> None:
    program = (
        "import sys, resources.environments.registry; print(sorted({'torch', 'gymnasium', 'numpy'} & set(sys.modules)))"
    )
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert seen.stdout.strip() == "[]"


def test_the_example_environment_plugs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/environments.md says: a class by import path with arguments in the run file."""
    folder = Path(__file__).resolve().parents[2] / "examples" / "own_environment"
    monkeypatch.syspath_prepend(str(folder))
    run_file = yaml.safe_load((folder / "run.yaml").read_text())
    config = FamilyConfig.model_validate(run_file["families"]["counting"])
    assert config.environment == "counting:Counting" and config.arguments
    transcript = asyncio.run(noisy_expert_episode(config, 3, 0.0, random.Random(0)))
    assert transcript.success and transcript.reward == 1.0
    assert len([m for m in transcript.messages if m["role"] == "assistant"]) == config.arguments["length"]

    async def malformed() -> StepOutcome:
        environment = make_environment(config)
        await environment.reset(3)
        return await environment.step("seven")

    outcome = asyncio.run(malformed())
    assert outcome.invalid_action and outcome.reward == -0.1 and not outcome.truncated
