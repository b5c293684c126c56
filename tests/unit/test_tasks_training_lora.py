"""LoRA: only the adapter moves, and what is published is what the learner computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from resources.object_store import ObjectStore
from tasks.training.config import LoraConfig
from tasks.training.token_reads import read_sampled_tokens
from tests.unit.test_tasks_training_learner import make_batch, make_learner, own_logprobs
from tests.unit.test_tasks_training_model import make_model_directory

LORA = LoraConfig(rank=4, alpha=8, publish="merged")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


def test_published_weights_give_the_learners_own_logprobs(directory: Path) -> None:
    learner, plain = make_learner(directory, lora=LORA), make_learner(directory)
    start = plain.tensors()
    for name, tensor in learner.tensors().items():
        assert torch.equal(tensor, start[name]), "an adapter starts as nothing"
    learner.update(make_batch(0), 0)
    rows = make_batch(1)
    values = read_sampled_tokens(
        rows, lambda batch: learner._forward.logprobs(batch)[0], learner.config, learner.device
    )
    means = [float(value[row.loss_mask].mean()) for value, row in zip(values, rows, strict=True)]
    np.testing.assert_allclose(own_logprobs(directory, learner, rows), means, atol=1e-4)
    moved = {name for name, tensor in learner.tensors().items() if not torch.equal(tensor, start[name])}
    assert moved and all(name.rpartition(".")[0].endswith(LORA.targets) for name in moved)


def test_a_checkpoint_holds_the_adapter_and_knows_its_base(directory: Path, tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path / "store"))
    original, restored = make_learner(directory, lora=LORA), make_learner(directory, lora=LORA)
    original.update(make_batch(0), 0)
    original.save(store, "c")
    restored.restore(store, "c")
    for learner in (original, restored):
        learner.update(make_batch(1), 1)
    first, second = original.tensors(), restored.tensors()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = make_model_directory(tmp_path / "other", tied=False)
    with pytest.raises(ValueError, match="is an adapter of the base"):
        make_learner(other, lora=LORA).restore(store, "c")
    with pytest.raises(ValueError, match="is of another model"):
        make_learner(directory).restore(store, "c")


def test_a_target_that_the_model_lacks_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.lora\.targets names \['query'\].*allowed: \['down_proj'"):
        make_learner(directory, lora=LoraConfig(targets=("query", "v_proj")))
