"""A user's own estimator, loss, correction or normaliser: what cannot be imported, built or used is refused by name
before anything starts; what it returns is checked before it reaches a weight."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.config import RunConfig, with_overrides
from flows.opening import _check_reference, check_inputs
from tasks.training.advantages.base import AdvantageInputs, Advantages
from tasks.training.config import TrainingConfig
from tasks.training.corrections.base import CorrectionInputs
from tasks.training.learner import Learner
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.requirements import check_own_parts
from tests.unit.test_tasks_training_learner import make_batch, make_learner, weights
from tests.unit.test_tasks_training_model import make_model_directory

FAMILIES = ["maze", "sums"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


class Own:
    """Meets every protocol; what it gives is in the arguments."""

    needs_proximal = False

    def __init__(self, config: Any) -> None:
        self.given = config.arguments["given"]

    def estimate(self, inputs: AdvantageInputs) -> Advantages:
        values = [np.ones(len(row.token_ids), np.float32) for row in inputs.rows]
        if self.given == "a column":
            values = [each[:, None] for each in values]
        if self.given == "one row too few":
            values = values[1:]
        if self.given == "NaN":
            values[0][:] = np.nan
        num_rows = len(inputs.rows)
        return Advantages(values, [None] * num_rows, {"maze": 1}, {}, num_unscored=0, num_rollouts=num_rows)

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        values_N = -inputs.advantages_N * inputs.current_logprobs_N
        ones_N = torch.ones_like(inputs.advantages_N)
        return TokenLosses(values_N[:, None] if self.given == "a column" else values_N, ones_N, ones_N < 0)

    def weights(self, inputs: CorrectionInputs) -> torch.Tensor:
        ones_N = torch.ones_like(inputs.staleness_N, dtype=torch.float32)
        return {"a column": ones_N[:, None], "NaN": ones_N * torch.nan, "below 0": -ones_N}[self.given]


class WithoutMethods:
    def __init__(self, config: Any) -> None: ...


class WithoutNeeds(WithoutMethods):
    def token_losses(self, inputs: LossInputs) -> None: ...


class OfTwo(WithoutMethods):
    def estimate(self, rows: Any, rewards: Any) -> None: ...


class Unconfigured:
    pass


class NeedsCritic(WithoutMethods):
    needs_critic = True

    def estimate(self, inputs: AdvantageInputs) -> None: ...


def of_one(num_tokens_R: np.ndarray) -> np.ndarray:
    return num_tokens_R


def of_three(num_tokens_R: np.ndarray, families_R: Any, num_families: int) -> np.ndarray:
    return np.ones(len(num_tokens_R))


NO_FUNCTION = 3


def estimator(name: str) -> dict[str, Any]:
    return {"advantage": {"estimator": name}}


def loss(name: str) -> dict[str, Any]:
    return {"loss": {"name": name}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no module": (
        loss("nowhere:Loss"),
        r"training.loss.name is 'nowhere:Loss', but module 'nowhere' is not importable",
    ),
    "no class": (loss(f"{__name__}:Absent"), r"has no 'Absent'; correct the path"),
    "a number": (loss(f"{__name__}:NO_FUNCTION"), r"is no class but of type int"),
    "a module that raises": (
        loss("tuesdays:Loss"),
        r"importing module 'tuesdays' raised RuntimeError: not on Tuesdays",
    ),
    "a module with a typing error": (loss("unbalanced:Loss"), r"importing module 'unbalanced' raised SyntaxError"),
    "a constructor that raises": (
        loss(f"{__name__}:Own"),
        r"whose constructor raised KeyError: 'given'; .*`arguments`",
    ),
    "a constructor without argument": (loss(f"{__name__}:Unconfigured"), r"whose constructor raised TypeError"),
    "a loss without its method": (loss(f"{__name__}:WithoutMethods"), r"has no 'needs_proximal'; it must have needs_"),
    "a loss without its need": (loss(f"{__name__}:WithoutNeeds"), r"needs_proximal and token_losses"),
    "an estimator without its method": (estimator(f"{__name__}:WithoutMethods"), r"has no 'estimate'"),
    "an estimator of two": (estimator(f"{__name__}:OfTwo"), r"whose estimate does not take 1 positional argument"),
    "an estimator without its critic": (estimator(f"{__name__}:NeedsCritic"), r"needs a critic, but training.critic"),
    "a correction without its method": (
        {"corrections": [{"name": f"{__name__}:WithoutMethods"}]},
        r"training.corrections is .* has no 'needs_proximal'",
    ),
    "a family's own": (
        {"families": {"sums": loss(f"{__name__}:Own")}},
        r"training.families.sums.loss.name is .* raised KeyError",
    ),
    "a normaliser of one": ({"normaliser": f"{__name__}:of_one"}, r"training.normaliser is .* does not take 3"),
    "a normaliser that is none": ({"normaliser": f"{__name__}:NO_FUNCTION"}, r"is no function but of type int"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_learner_could_not_use_is_refused_at_the_start(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tuesdays.py").write_text("raise RuntimeError('not on Tuesdays')")
    (tmp_path / "unbalanced.py").write_text("def loss(:")
    monkeypatch.syspath_prepend(tmp_path)
    changes, told = REFUSED[case]
    config = TrainingConfig.model_validate(changes)
    with pytest.raises(ValueError, match=told):
        check_own_parts(config, FAMILIES)


def test_what_can_be_used_or_is_not_used_is_let_through() -> None:
    check_own_parts(TrainingConfig.model_validate({"normaliser": f"{__name__}:of_three"}), FAMILIES)
    own = {"advantage": {"estimator": f"{__name__}:Own", "arguments": {"given": ""}}}
    check_own_parts(TrainingConfig.model_validate(own), FAMILIES)
    replaced = {**loss("nowhere:Loss"), "families": {"maze": loss("gspo"), "sums": loss("cispo")}}
    check_own_parts(TrainingConfig.model_validate(replaced), FAMILIES)


def test_a_run_is_refused_before_it_begins(tmp_path: Path) -> None:
    """What `train` checks before it starts anything: plug-ins, and a reference that could not score the ids."""
    config = with_overrides(RunConfig(), {"store": str(tmp_path), "training.loss.name": f"{__name__}:Own"})
    with pytest.raises(ValueError, match="whose constructor raised KeyError"):
        check_inputs(config)
    kl = {"store": str(tmp_path), "training.kl.coefficient": 0.1}
    config = with_overrides(RunConfig(), {**kl, "training.reference": {"model_directory": str(tmp_path / "none")}})
    with pytest.raises(ValueError, match=r"training.reference.model_directory: model directory .* does not exist"):
        check_inputs(config)


def test_a_reference_of_another_vocabulary_is_refused_before_the_run_begins(directory: Path, tmp_path: Path) -> None:
    other = make_model_directory(tmp_path, vocab_size=64)
    data = {"policy": {"model_directory": str(directory)}, "warm_start": None}
    for reference in (directory, other):
        training = {"kl": {"coefficient": 0.1}, "reference": {"model_directory": str(reference)}}
        config = RunConfig.model_validate({**data, "training": training})
        if reference is directory:
            _check_reference(config)
            continue
        with pytest.raises(ValueError, match=r"vocabulary holds 64 tokens, and that of policy.model_directory 40"):
            _check_reference(config)


def test_built_in_algorithms_are_not_imported_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """They bring torch into a process that only starts the run."""
    monkeypatch.setitem(sys.modules, "tasks.training.algorithms", None)
    check_own_parts(TrainingConfig(), FAMILIES)


# -- what they return --------------------------------------------------------------------------------------------------


def learner_of(directory: Path, section: str, given: str) -> Learner:
    named = {"name" if section != "advantage" else "estimator": f"{__name__}:Own", "arguments": {"given": given}}
    changes = {"corrections": [named]} if section == "corrections" else {section: named}
    return make_learner(directory, **TrainingConfig.model_validate({**changes, "minibatches": 1}).model_dump())


@pytest.mark.parametrize(
    ("section", "given", "told"),
    [
        ("advantage", "a column", r"gave an array of shape \(\d+, 1\) for a row of shape \(\d+,\)"),
        ("advantage", "one row too few", r"estimator .*Own' gave"),
        ("advantage", "NaN", r"gave an advantage that is NaN or infinite for trajectory"),
        ("loss", "a column", r"loss Own gave values_N of shape \(\d+, 1\) for \d+ tokens"),
        ("corrections", "a column", r"correction 'Own' gave weights of shape \(\d+, 1\)"),
        ("corrections", "NaN", r"correction 'Own' gave .*negative, NaN or infinite"),
        ("corrections", "below 0", r"correction 'Own' gave .*negative"),
    ],
)
def test_what_would_be_broadcast_or_is_not_finite_never_reaches_a_weight(
    directory: Path, section: str, given: str, told: str
) -> None:
    learner = learner_of(directory, section, given)
    before = weights(learner)
    with pytest.raises(ValueError, match=told):
        learner.update(make_batch(0), 0)
    assert torch.equal(weights(learner), before)
