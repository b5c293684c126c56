"""The learner from update to update: metrics, skips, refusals, checkpoints. M4, M5, S4."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from resources.object_store import ObjectStore
from tasks.training.config import LossConfig, OptimizerConfig, TrainingConfig
from tasks.training.learner import Learner
from tasks.training.objective import Objective
from tasks.training.plugins import NORMALISERS
from tasks.training.row import TrainingRow
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import make_row

OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_updates=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


def make_learner(directory: Path, seed: int = 0, **changes) -> Learner:
    return Learner(directory, TrainingConfig(**{"optimizer": OPTIMIZER, "minibatches": 2, **changes}), seed=seed)


def make_batch(version: int, *, sampled_under: int | None = None) -> list[TrainingRow]:
    """Two families, two groups of four each, rewards that differ within every group, lengths that differ everywhere."""
    rows = []
    for group in range(4):
        for member in range(4):
            index = 16 * version + 4 * group + member
            rows.append(
                make_row(
                    index,
                    length=10 + 3 * member + group,
                    trained=(4, 5, 8),
                    reward=float(member % 2),
                    family="maze" if group < 2 else "sums",
                    group=f"v{version}-{group}",
                    version=version if sampled_under is None else sampled_under,
                    temperature=0.9,
                )
            )
    return rows


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in learner.tensors().values()])


def test_an_update_moves_the_policy_towards_what_was_rewarded(directory: Path) -> None:
    learner = make_learner(directory)
    rows = make_batch(0)
    before = own_logprobs(directory, None, rows)
    report = learner.update(rows, 0)
    after = own_logprobs(directory, learner, rows)
    rewarded = [i for i, row in enumerate(rows) if row.reward == 1.0]
    others = [i for i, row in enumerate(rows) if row.reward == 0.0]
    assert np.mean(after[rewarded] - before[rewarded]) > 0.01 > np.mean(after[others] - before[others])
    assert report.version == learner.version == 1
    assert report.optimizer_steps == learner.optimizer_step == 2
    assert report.skipped is None


def own_logprobs(directory: Path, learner: Learner | None, rows: list[TrainingRow]) -> np.ndarray:
    """Mean log-probability of each row's sampled tokens through transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if learner is not None:
        model.load_state_dict(learner.tensors(), strict=False)
    means = []
    for row in rows:
        ids = torch.tensor(row.token_ids, dtype=torch.int64)
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0] / row.temperature, -1)
        means.append(np.mean([float(logprobs[t - 1, ids[t]]) for t in row.loss_mask.nonzero()[0]]))
    return np.array(means)


def test_metrics_are_finite_json_under_the_names_people_look_for(directory: Path) -> None:
    metrics = make_learner(directory).update(make_batch(0), 0).metrics
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics
    assert metrics["reward/maze"] == metrics["reward/sums"] == metrics["reward/mean"] == 0.5
    assert metrics["num_groups/maze"] == 2 and metrics["num_trajectories/sums"] == 8
    assert metrics["dead_group_share"] == 0.0
    assert metrics["tokens/trained"] == 48 and metrics["trained_tokens/maze"] == 24
    assert metrics["advantage/std"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["staleness/mean"] == metrics["staleness/max"] == 0
    for name in ("ratio/mean", "ratio/min", "ratio/max", "clip_share", "approx_kl", "entropy", "loss", "grad_norm"):
        assert math.isfinite(metrics[name]), name
    assert metrics["learning_rate"] == 1e-2
    assert 0.0 < metrics["entropy"] < math.log(40)


@pytest.mark.parametrize("loss", ["ppo_clip", "decoupled"])
def test_engine_difference_is_measured_before_the_first_step_and_drift_apart(directory: Path, loss: str) -> None:
    """Rows that carry the learner's own log-probabilities show no difference, though the steps change the weights."""
    learner = make_learner(directory, loss=LossConfig(name=loss), minibatches=1)
    rows = [
        with_logprobs(
            directory, row, shift=0.0 if row.family == "maze" else 0.25, version=0 if row.family == "maze" else -1
        )
        for row in make_batch(1, sampled_under=1)
    ]
    learner.version = 1
    metrics = learner.update(rows, 1).metrics
    assert metrics["engine_difference/num_tokens"] == metrics["policy_drift/num_tokens"] == 24
    assert metrics["engine_difference/max"] < 1e-5
    assert metrics["policy_drift/mean"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["staleness/max"] == 1 and metrics["staleness/mean"] == 0.5


def with_logprobs(directory: Path, row: TrainingRow, *, shift: float, version: int) -> TrainingRow:
    """The row as an engine with the weights of ``directory`` would have sampled it, its log-probabilities lowered."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor(row.token_ids, dtype=torch.int64)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0] / row.temperature, -1)
    for t in row.loss_mask.nonzero()[0]:
        row.behaviour_logprobs[t] = float(logprobs[t - 1, ids[t]]) - shift
        row.token_versions[t] += version
    return row


def test_the_decoupled_loss_starts_every_token_at_ratio_one(directory: Path) -> None:
    config = LossConfig(name="decoupled", behaviour_weight_cap=0.1)
    metrics = make_learner(directory, loss=config, minibatches=1).update(make_batch(0), 0).metrics
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0
    assert metrics["clip_share"] == 0.0
    assert metrics["behaviour_weight/truncated_share"] > 0.5


@pytest.mark.parametrize("loss", ["ppo_clip", "decoupled", "gspo"])
@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_m4_a_batch_with_nothing_to_train_is_skipped_aloud(directory: Path, loss: str, normaliser: str) -> None:
    """M4 and M1: all groups dead or unscored: no step, no NaN; the version advances, the skip is counted, explained."""
    fixed = 16 if normaliser == "fixed_length" else None
    learner = make_learner(directory, loss=LossConfig(name=loss), normaliser=normaliser, fixed_length_tokens=fixed)
    before = weights(learner)
    rows = [make_row(i, reward=2.0, group="a") for i in range(4)] + [
        make_row(i, reward=None, group="b") for i in range(2)
    ]
    report = learner.update(rows, 0)
    assert torch.equal(weights(learner), before)
    assert (report.version, report.optimizer_steps) == (1, 0)
    assert report.skipped is not None and "'dead_group': 12" in report.skipped and "'unscored': 6" in report.skipped
    assert report.metrics["notes"] == [report.skipped]
    assert report.metrics["skipped_updates_total"] == 1
    assert report.metrics["dead_group_share"] == 1.0
    json.dumps(report.metrics, allow_nan=False)
    assert learner.update(make_batch(1), 1).optimizer_steps == 2


def test_an_empty_batch_is_skipped(directory: Path) -> None:
    report = make_learner(directory).update([], 0)
    assert report.skipped is not None and "none was sampled" in report.skipped
    json.dumps(report.metrics, allow_nan=False)


def test_m5_a_row_without_trained_tokens_beside_normal_ones(directory: Path) -> None:
    """M5: every metric stays finite, and the row's reward stays in the baseline."""
    rows = make_batch(0)
    rows[0] = make_row(0, trained=(), reward=0.0, group="v0-0")
    report = make_learner(directory).update(rows, 0)
    json.dumps(report.metrics, allow_nan=False)
    assert report.metrics["tokens/trained"] == 45
    assert report.metrics["reward/maze"] == 0.5


def test_zero_variance_groups_leave_loss_and_denominators(directory: Path) -> None:
    """The same update with and without a dead group gives the same weights, bit for bit."""
    rows = make_batch(0)
    dead = [make_row(100 + i, reward=1.0, group="dead", family="maze") for i in range(4)]
    one, other = make_learner(directory), make_learner(directory)
    one.update(rows, 0)
    metrics = other.update([*rows, *dead], 0).metrics
    assert torch.equal(weights(one), weights(other))
    assert metrics["dead_group_share/maze"] == pytest.approx(1 / 3) and metrics["tokens/masked/dead_group"] == 12


def test_unscored_members_change_nothing_but_the_counts(directory: Path) -> None:
    """S4: an unscored member is out of baseline, loss and denominators."""
    rows = make_batch(0)
    one, other = make_learner(directory), make_learner(directory)
    one.update(rows, 0)
    metrics = other.update([*rows, make_row(99, reward=None, group="v0-0")], 0).metrics
    assert torch.equal(weights(one), weights(other))
    assert metrics["tokens/masked/unscored"] == 3 and metrics["unscored_share"] == pytest.approx(1 / 17)


def test_same_seed_same_weights_other_seed_other_order(directory: Path) -> None:
    learners = [make_learner(directory, seed=seed) for seed in (5, 5, 6)]
    for learner in learners:
        learner.update(make_batch(0), 0)
    assert torch.equal(weights(learners[0]), weights(learners[1]))
    assert not torch.equal(weights(learners[0]), weights(learners[2]))


def test_a_restored_learner_takes_bitwise_the_same_next_update(directory: Path, tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    original = make_learner(directory, loss=LossConfig(name="decoupled"), epochs=2)
    original.update(make_batch(0), 0)
    original.update([], 1)
    original.save(store, "checkpoints/v000002")
    restored = make_learner(directory, loss=LossConfig(name="decoupled"), epochs=2)
    restored.restore(store, "checkpoints/v000002")
    assert (restored.version, restored.optimizer_step, restored.skipped_updates) == (2, 4, 1)
    assert torch.equal(weights(original), weights(restored))
    for version in (2, 3):
        first, second = original.update(make_batch(version), version), restored.update(make_batch(version), version)
        assert torch.equal(weights(original), weights(restored))
        for name, value in first.metrics.items():
            if not name.startswith(("time/", "tokens_per_s")):
                assert second.metrics[name] == value, name
    assert sorted(store.list("checkpoints")) == [
        f"checkpoints/v000002/{name}" for name in ("model.safetensors", "optimizer.safetensors", "state.json")
    ]


def test_a_checkpoint_before_the_first_step_restores(directory: Path, tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    original, restored = make_learner(directory), make_learner(directory)
    original.save(store, "start")
    restored.restore(store, "start")
    original.update(make_batch(0), 0)
    restored.update(make_batch(0), 0)
    assert torch.equal(weights(original), weights(restored))


def test_wrong_checkpoints_are_refused_and_change_nothing(directory: Path, tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    learner = make_learner(directory)
    learner.update(make_batch(0), 0)
    learner.save(store, "c")
    with pytest.raises(KeyError):
        make_learner(directory).restore(store, "absent")
    with pytest.raises(ValueError, match="written with seed 0, not 1"):
        make_learner(directory, seed=1).restore(store, "c")
    untied = make_learner(make_model_directory(tmp_path / "untied", tied=False))
    before = weights(untied)
    with pytest.raises(ValueError, match=r"is of another model: it lacks \['lm_head\.weight'\]"):
        untied.restore(store, "c")
    assert torch.equal(weights(untied), before)
    damaged = bytearray(store.get("c/optimizer.safetensors"))
    damaged[-1] ^= 1
    store.put("c/optimizer.safetensors", bytes(damaged))
    with pytest.raises(ValueError, match=r"optimizer\.safetensors does not match its hash"):
        make_learner(directory).restore(store, "c")


def test_a_batch_is_trained_once_and_in_order(directory: Path) -> None:
    learner = make_learner(directory)
    learner.update(make_batch(0), 0)
    for version in (0, 2):
        with pytest.raises(ValueError, match=f"holds version 1; batch {version} is not the next one"):
            learner.update(make_batch(version), version)


def test_a_bad_row_changes_nothing(directory: Path) -> None:
    learner = make_learner(directory)
    before = weights(learner)
    with pytest.raises(ValueError, match="reward is nan"):
        learner.update([*make_batch(0), make_row(0, reward=float("nan"), group="x")], 0)
    assert torch.equal(weights(learner), before)
    assert learner.update(make_batch(0), 0).version == 1


def test_a_learner_that_failed_half_way_refuses_to_go_on_until_restored(directory: Path, tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    learner = make_learner(directory)
    learner.save(store, "start")
    working = learner._parts
    learner._parts = replace(working, loss=FailingObjective(learner.algorithms))
    with pytest.raises(FloatingPointError):
        learner.update(make_batch(0), 0)
    learner._parts = working
    with pytest.raises(RuntimeError, match="restore a checkpoint first"):
        learner.update(make_batch(0), 0)
    learner.restore(store, "start")
    assert learner.update(make_batch(0), 0).version == 1


class FailingObjective(Objective):
    """Raises on the first micro-batch."""

    def token_losses(self, inputs, families_S, weights_N=None):
        raise FloatingPointError("no loss today")


def test_published_tensors_make_a_loadable_directory(directory: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    learner = make_learner(directory)
    learner.update(make_batch(0), 0)
    tensors = learner.tensors()
    assert "lm_head.weight" not in tensors
    for name, data in learner.files().items():
        (tmp_path / name).write_bytes(data)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rows = make_batch(0)[:1]
    ids = torch.tensor(rows[0].token_ids, dtype=torch.int64)[None]
    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    expected = own_logprobs(directory, learner, rows)
    with torch.no_grad():
        logprobs = torch.log_softmax(loaded(input_ids=ids).logits[0] / rows[0].temperature, -1)
    mean = np.mean([float(logprobs[t - 1, ids[0, t]]) for t in rows[0].loss_mask.nonzero()[0]])
    assert mean == pytest.approx(expected[0], abs=1e-5)
    learner.update(make_batch(1), 1)
    assert not torch.equal(tensors["model.norm.weight"], learner.tensors()["model.norm.weight"]), "tensors are copies"
