"""What never reaches the weights: a loss, or a gradient behind a finite loss, that is not finite; a checkpoint of
another shape."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from resources.object_store import ObjectStore
from resources.rewards.checked import HIGHEST_REWARD
from tasks.training.algorithm_config import AdvantageConfig, CriticConfig, LossConfig
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.plugins import ESTIMATORS
from tasks.training.row import TurnSpan
from tasks.training.steps import NonFiniteUpdate
from tests.unit.test_tasks_training_learner import make_batch, make_learner, weights
from tests.unit.test_tasks_training_model import make_model_directory


class Breaking:
    """The policy gradient, broken in the first ``broken_steps`` micro-batches: ``loss`` is NaN there, or ``gradient``
    infinite behind a loss of 0 (the root of 0)."""

    needs_proximal = False

    def __init__(self, config: LossConfig) -> None:
        self.what, self.left = config.arguments["what"], config.arguments["broken_steps"]

    def token_losses(self, inputs: LossInputs) -> TokenLosses:
        current_N = inputs.current_logprobs_N
        values_N = -inputs.advantages_N * current_N
        if self.left > 0:
            self.left -= 1
            values_N = values_N * math.nan if self.what == "loss" else (current_N - current_N.detach()).sqrt()
        ones_N = torch.ones_like(current_N).detach()
        return TokenLosses(values_N, ones_N, ones_N < 0)


def breaking(what: str, broken_steps: int) -> LossConfig:
    return LossConfig(name=f"{__name__}:Breaking", arguments={"what": what, "broken_steps": broken_steps})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(("what", "told"), [("loss", "loss nan"), ("gradient", r"loss 0\.0, gradient norm (inf|nan)")])
def test_stop_fails_the_update_before_the_weights_change(directory: Path, tmp_path: Path, what: str, told: str) -> None:
    learner = make_learner(directory, loss=breaking(what, 1), minibatches=2, on_nonfinite="stop")
    store = ObjectStore.open(str(tmp_path))
    learner.save(store, "start")
    before = weights(learner)
    with pytest.raises(NonFiniteUpdate, match=rf"update 0: {told}.*; the step was not taken.*training\.on_nonfinite"):
        learner.update(make_batch(0), 0)
    assert torch.equal(weights(learner), before)
    with pytest.raises(RuntimeError, match="restore a checkpoint first"):
        learner.update(make_batch(0), 0)
    learner.restore(store, "start")
    assert learner.update(make_batch(0), 0).optimizer_steps == 2


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_skip_drops_the_step_counts_it_and_takes_the_next_one(directory: Path, what: str) -> None:
    """The moments are untouched too: the step that is taken is that of a learner which never saw the broken one."""
    learner = make_learner(directory, loss=breaking(what, 1), minibatches=2, on_nonfinite="skip")
    before = weights(learner)
    report = learner.update(make_batch(0), 0)
    assert (report.optimizer_steps, report.skipped, report.version) == (1, None, 1)
    assert report.metrics["optimizer_steps/skipped_total"] == 1
    assert report.metrics["notes"] == ["1 optimizer steps were dropped: loss or gradient was NaN or infinite"]
    json.dumps(report.metrics, allow_nan=False)
    assert torch.isfinite(weights(learner)).all() and not torch.equal(weights(learner), before)
    assert all(torch.isfinite(value).all() for state in learner._optimizer.state.values() for value in state.values())
    assert {int(state["step"]) for state in learner._optimizer.state.values()} == {1}


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_skip_of_every_step_is_a_skipped_update_that_says_so(directory: Path, what: str) -> None:
    learner = make_learner(directory, loss=breaking(what, 2), minibatches=2, on_nonfinite="skip")
    before = weights(learner)
    report = learner.update(make_batch(0), 0)
    assert (report.optimizer_steps, report.version) == (0, 1)
    assert report.skipped == "2 optimizer steps were dropped: loss or gradient was NaN or infinite"
    assert torch.equal(weights(learner), before)
    json.dumps(report.metrics, allow_nan=False)
    assert learner.update(make_batch(1), 1).optimizer_steps == 2


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_critics_gradient_that_is_infinite_reaches_neither_head_nor_policy(
    directory: Path, monkeypatch: pytest.MonkeyPatch, on_nonfinite: str
) -> None:
    """Behind a loss and a policy gradient that are finite."""
    learner = make_learner(
        directory,
        advantage=AdvantageConfig(estimator="gae"),
        critic=CriticConfig(train_decoder=False),
        minibatches=1,
        on_nonfinite=on_nonfinite,
    )
    critic = learner._critic
    assert critic is not None
    losses = critic.losses

    def infinite(values_N: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses_N, clipped_N = losses(values_N, *others)
        return losses_N.detach() + (values_N - values_N.detach()).sqrt(), clipped_N

    monkeypatch.setattr(critic, "losses", infinite)
    before = [weights(learner), *critic.tensors().values()]
    if on_nonfinite == "stop":
        with pytest.raises(NonFiniteUpdate, match=r"gradient norm (inf|nan)"):
            learner.update(make_batch(0), 0)
    else:
        assert learner.update(make_batch(0), 0).optimizer_steps == 0
    after = [weights(learner), *critic.tensors().values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_checkpoint_of_other_shapes_is_refused_and_changes_nothing(directory: Path, tmp_path: Path) -> None:
    """The same names, another vocabulary: as when a run is resumed with another policy."""
    store = ObjectStore.open(str(tmp_path / "store"))
    learner = make_learner(directory)
    learner.update(make_batch(0), 0)
    learner.save(store, "c")
    other = make_learner(make_model_directory(tmp_path / "other", vocab_size=48))
    before = weights(other)
    with pytest.raises(ValueError, match=r"is of another model: model\.embed_tokens\.weight has shape \(40, "):
        other.restore(store, "c")
    assert torch.equal(weights(other), before) and other.version == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_largest_rewards_that_are_taken_leave_every_figure_finite(directory: Path, estimator: str) -> None:
    """Each estimator squares, sums or discounts them; beyond the bound the row is refused."""
    rows = [
        replace(
            row,
            reward=HIGHEST_REWARD * (number % 2),
            turns=(TurnSpan(0, 4, 9, HIGHEST_REWARD * (number % 2)),),
            reward_components={"outcome": HIGHEST_REWARD * (number % 2)},
        )
        for number, row in enumerate(make_batch(0))
    ]
    critic = CriticConfig() if estimator == "gae" else None
    learner = make_learner(
        directory, advantage=AdvantageConfig(estimator=estimator), critic=critic, minibatches=1, on_nonfinite="skip"
    )
    metrics = learner.update(rows, 0).metrics
    json.dumps({name: value for name, value in metrics.items() if not name.startswith("critic/")}, allow_nan=False)
    assert torch.isfinite(weights(learner)).all()
