"""Checkpoints that must not be taken over, and what a learner that ends while it writes one leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from resources.object_store import ObjectStore
from tasks.training.algorithm_config import AdvantageConfig, CriticConfig
from tasks.training.config import LoraConfig
from tasks.training.learner import Learner
from tests.unit.test_tasks_training_learner import make_batch, make_learner, weights
from tests.unit.test_tasks_training_model import make_model_directory

CRITIC: dict[str, Any] = {"advantage": AdvantageConfig(estimator="gae"), "critic": CriticConfig()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "store"))


def saved(directory: Path, store: ObjectStore, **changes: Any) -> Learner:
    learner = make_learner(directory, **changes)
    learner.update(make_batch(0), 0)
    learner.save(store, "c")
    return learner


def held(learner: Learner) -> list[torch.Tensor]:
    """All that a restore could change."""
    moments = [value for state in learner._optimizer.state.values() for value in state.values()]
    critic = [] if learner._critic is None else list(learner._critic.tensors().values())
    return [weights(learner), *(moment.clone() for moment in moments), *critic]


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=4, alpha=32), r"is an adapter scaled by 2, and training\.lora\.alpha / rank is 8"),
        (LoraConfig(rank=2, alpha=4), r"is of another model: .*lora_A.* has shape \(4, \d+\), this model's has \(2, "),
        (LoraConfig(rank=4, alpha=8, targets=("q_proj",)), r"is of another model: it lacks \[\] and has \["),
        (None, r"is of another model: it lacks \['model\.embed_tokens\.weight'"),
    ],
)
def test_another_adapters_checkpoint_is_refused(
    directory: Path, store: ObjectStore, lora: LoraConfig | None, message: str
) -> None:
    saved(directory, store, lora=LoraConfig(rank=4, alpha=8))
    other = make_learner(directory, lora=lora)
    other.update(make_batch(0), 0)
    before = held(other)
    with pytest.raises(ValueError, match=message):
        other.restore(store, "c")
    assert all(torch.equal(one, two) for one, two in zip(before, held(other), strict=True)) and other.version == 1


def rewrite(store: ObjectStore, name: str, change: Callable[[bytes], bytes], *, hashed: bool) -> None:
    data = change(store.get(f"c/{name}"))
    store.put(f"c/{name}", data)
    if hashed:
        state = store.get_json("c/state.json")
        state["sha256"][name] = hashlib.sha256(data).hexdigest()
        store.put_json("c/state.json", state)


def wider(data: bytes) -> bytes:
    return save({name: torch.cat([each, each], -1) if each.ndim else each for name, each in load(data).items()})


def wider_moments(data: bytes) -> bytes:
    tensors = load(data)
    moments = {name for name, each in tensors.items() if name.startswith("optimizer.") and each.ndim}
    return save({name: torch.cat([each, each], -1) if name in moments else each for name, each in tensors.items()})


@pytest.mark.parametrize(
    ("name", "change", "hashed", "message"),
    [
        ("critic.safetensors", wider, True, "critic has head.weight of shape"),
        ("critic.safetensors", wider_moments, True, "critic has optimizer.weight.exp_avg of shape"),
        ("critic.safetensors", lambda data: data[:-8], False, "critic.safetensors does not match its hash"),
        ("optimizer.safetensors", wider, True, "is of another model: exp_avg"),
        ("model.safetensors", lambda data: data[:-8], False, "model.safetensors does not match its hash"),
    ],
)
def test_a_checkpoint_that_is_wrong_in_one_place_changes_nothing(
    directory: Path, store: ObjectStore, name: str, change: Callable[[bytes], bytes], hashed: bool, message: str
) -> None:
    saved(directory, store, **CRITIC)
    rewrite(store, name, change, hashed=hashed)
    other = make_learner(directory, **CRITIC)
    other.update(make_batch(1, sampled_under=0), 0)
    before = held(other)
    with pytest.raises(ValueError, match=message):
        other.restore(store, "c")
    assert all(torch.equal(one, two) for one, two in zip(before, held(other), strict=True)) and other.version == 1


def test_a_checkpoint_that_lacks_a_file_says_so(directory: Path, store: ObjectStore) -> None:
    saved(directory, store)
    store.delete("c/optimizer.safetensors")
    with pytest.raises(ValueError, match=r"optimizer\.safetensors is missing"):
        make_learner(directory).restore(store, "c")


class DyingStore:
    """Writes so many objects, then the process ends."""

    def __init__(self, store: ObjectStore, writes: int) -> None:
        self._put, self.left = store.put, writes

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.left == 0:
            raise SystemExit("killed")
        self.left -= 1
        self._put(key, data)


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_whoever_dies_over_a_checkpoint_leaves_the_old_one_or_none(
    directory: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """A group that was built again may replace a checkpoint by one that differs in the last bits."""
    saved(directory, store)
    again = make_learner(directory, minibatches=1)
    again.update(make_batch(0), 0)
    monkeypatch.setattr(store, "put", DyingStore(store, writes).put)
    with pytest.raises(SystemExit):
        again.save(store, "c")
    monkeypatch.undo()
    with pytest.raises(KeyError):
        make_learner(directory).restore(store, "c")
    again.save(store, "c")
    restored = make_learner(directory, minibatches=1)
    restored.restore(store, "c")
    assert torch.equal(weights(restored), weights(again))


def test_the_same_checkpoint_again_is_never_gone_for_a_moment(
    directory: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the only one: the publication it belongs to was asked for again."""
    learner = saved(directory, store)
    monkeypatch.setattr(store, "put", DyingStore(store, 0).put)
    learner.save(store, "c")
    make_learner(directory).restore(store, "c")
