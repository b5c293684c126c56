"""Several ranks train what one trains: weights, metrics, checkpoints. And what happens when one of them is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from resources.failures import InfrastructureFailure
from resources.object_store import ObjectStore
from tasks.training.algorithm_config import AdvantageConfig, CorrectionConfig, CriticConfig, KLConfig
from tasks.training.config import LoraConfig, LossConfig, OptimizerConfig, TrainingConfig
from tasks.training.learner import Learner
from tasks.training.minibatches import deal_to_ranks
from tasks.training.ranks import ProcessRanks, Rendezvous
from tasks.training.row import TrainingRow
from tests.rank_processes import TIMEOUT_S, on_ranks
from tests.unit.test_tasks_training_learner import make_batch, make_learner
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import make_row

NUM_UPDATES = 4
COMMON: dict[str, Any] = {"optimizer": OptimizerConfig(learning_rate=1e-3, warmup_updates=0)}
DECOUPLED: dict[str, Any] = {
    **COMMON,
    "loss": LossConfig(name="decoupled"),
    "minibatches": 3,
    "epochs": 2,
    "max_tokens_per_microbatch": 40,
}
LORA: dict[str, Any] = {
    **COMMON,
    "lora": LoraConfig(rank=4, alpha=8),
    "gradient_checkpointing": True,
    "max_logits_per_chunk": 120,
    "minibatches": 2,
}
Make = Callable[..., Learner]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


def train(config: dict[str, Any], make: Make, rank: int = 0) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Several updates, the last one of a single group, so that a rank runs out of rows before the other does."""
    learner = make(**config)
    reports = [learner.update(make_batch(version), version).metrics for version in range(NUM_UPDATES)]
    few = [make_row(index, reward=float(index), group="few", version=0) for index in range(2)]
    reports.append(learner.update(few, NUM_UPDATES).metrics)
    return learner.tensors(), reports


def save_after_two(store: str, make: Make, rank: int) -> dict[str, torch.Tensor]:
    learner = make(**DECOUPLED)
    for version in (0, 1):
        learner.update(make_batch(version), version)
    learner.save(ObjectStore.open(store), "two-ranks")
    learner.update(make_batch(2), 2)
    return learner.tensors()


def go_on_from(store: str, name: str, make: Make, rank: int) -> dict[str, torch.Tensor]:
    learner = make(**DECOUPLED)
    learner.restore(ObjectStore.open(store), name)
    learner.update(make_batch(2), 2)
    return learner.tensors()


def differ(make: Make, rank: int) -> None:
    make(**COMMON).update(make_batch(0)[rank:], 0)


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(directory: Path, tmp_path: Path) -> None:
    """Weights to 1e-5 after several updates, the whole model and an adapter; checkpoints of either load into both."""
    store = str(tmp_path)
    one = make_learner(directory, **DECOUPLED)
    for version in (0, 1):
        one.update(make_batch(version), version)
    one.save(ObjectStore.open(store), "one-rank")
    full, adapter, resumed, from_one, refused = on_ranks(
        2,
        directory,
        partial(train, DECOUPLED),
        partial(train, LORA),
        partial(save_after_two, store),
        partial(go_on_from, store, "one-rank"),
        differ,
    )
    for config, ranks in ((DECOUPLED, full), (LORA, adapter)):
        tensors, reports = train(config, partial(make_learner, directory))
        assert_close(tensors, ranks[0][0])
        assert ranks[1][0] == {}, "the first rank alone gets the weights"
        for expected, *found in zip(reports, ranks[0][1], ranks[1][1], strict=True):
            for name, value in expected.items():
                if not name.startswith(("time/", "tokens_per_s")):
                    assert [other[name] for other in found] == pytest.approx([value] * 2, rel=1e-3, abs=1e-5), name
    one.update(make_batch(2), 2)
    assert_close(one.tensors(), resumed[0])
    assert_close(one.tensors(), from_one[0])
    back = make_learner(directory, **DECOUPLED)
    back.restore(ObjectStore.open(store), "two-ranks")
    back.update(make_batch(2), 2)
    assert_close(back.tensors(), resumed[0])
    assert all("read different batches" in str(error) for error in refused)


# With a large epsilon AdamW's step shows the gradient's length, and the clip is always active.
COMBINED: dict[str, Any] = {
    "optimizer": OptimizerConfig(learning_rate=1e-2, warmup_updates=0, adam_epsilon=1e-2, max_grad_norm=0.3),
    "max_tokens_per_microbatch": 40,
    "max_logits_per_chunk": 120,
    "minibatches": 2,
    "kl": KLConfig(coefficient=0.1),
    "advantage": AdvantageConfig(estimator="gae"),
    "critic": CriticConfig(train_decoder=True),
    "loss": LossConfig(name="ppo_clip", ratio_to="proximal", entropy_coefficient=0.02),
    "corrections": (CorrectionConfig(name="ratio_mask"),),
    "gradient_checkpointing": True,
}


def uneven_batch(version: int) -> list[TrainingRow]:
    """Two long rows of many trained tokens beside two short ones of one each; in odd versions, the short ones alone."""
    rows = []
    for group, (length, trained) in enumerate(((5, (3,)), (110, tuple(range(3, 100, 3))))[: 2 - version % 2]):
        for member in range(2):
            rows.append(
                make_row(
                    10 * version + 2 * group + member,
                    length=length + member,
                    trained=trained,
                    reward=float(member),
                    family="maze" if group else "sums",
                    group=f"{version}-{group}",
                    version=version,
                )
            )
    return rows


def train_uneven(config: dict[str, Any], make: Make, rank: int = 0) -> Any:
    learner = make(**config)
    reports = [learner.update(uneven_batch(version), version).metrics for version in range(NUM_UPDATES)]
    assert learner._critic is not None
    return learner.tensors(), learner._critic.tensors(), reports


@pytest.mark.slow
def test_three_ranks_train_what_one_trains_with_fewer_rows_than_ranks(directory: Path) -> None:
    """All that the learner combines; a rank without any row in half of the steps, and rows of very unequal length."""
    configs = [COMBINED, {**COMBINED, "lora": LoraConfig(rank=4, alpha=8)}]
    for config, ranks in zip(
        configs, on_ranks(3, directory, *(partial(train_uneven, config) for config in configs)), strict=True
    ):
        tensors, critic, reports = train_uneven(config, partial(make_learner, directory))
        assert_close(tensors, ranks[0][0])
        for _, found, metrics in ranks:
            assert_close(critic, found)
            for one, other in zip(reports, metrics, strict=True):
                for name in ("loss", "grad_norm", "critic/grad_norm", "critic/loss", "reference_kl", "entropy"):
                    assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def assert_close(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert float((tensor - found[name]).abs().max()) <= 1e-5, name


def end_in_an_update(make: Make, rank: int) -> None:
    learner = make(**COMMON)
    if rank == 1:
        learner._loss.token_losses = lambda *_: os._exit(1)
    learner.update(make_batch(0), 0)


@pytest.mark.slow
def test_a_rank_whose_neighbour_dies_leaves_its_collective(directory: Path) -> None:
    """At once, long before the collective's timeout; and it does not train on."""
    [(survivor, dead)] = on_ranks(2, directory, end_in_an_update)
    assert dead is None
    assert isinstance(survivor, RuntimeError) and "gloo" in str(survivor)


def change_places(directory: Path, store: str, make: Make, rank: int) -> dict[str, torch.Tensor]:
    """Train and save in one group; restore and go on in another of the same processes, whose first rank was the last
    one."""
    learner = make(**DECOUPLED)
    learner.save(ObjectStore.open(store), "start")
    learner.ranks.gather("the first rank has written")
    learner.restore(ObjectStore.open(store), "start")
    learner.update(make_batch(0), 0)
    learner.save(ObjectStore.open(store), "c")
    meeting = Rendezvous("127.0.0.1", 2, TIMEOUT_S) if rank == 1 else None
    address = learner.ranks.gather(meeting and meeting.address)[1]
    learner.ranks.leave()
    ranks = ProcessRanks(1 - rank, 2, address, device="cpu", timeout_s=TIMEOUT_S, store=meeting and meeting.store)
    try:
        learner = Learner(directory, TrainingConfig(**DECOUPLED), seed=0, ranks=ranks)
        learner.restore(ObjectStore.open(store), "c")
        learner.update(make_batch(1), 1)
        return learner.tensors()
    finally:
        ranks.leave()


@pytest.mark.slow
def test_a_process_may_have_another_place_in_the_next_group(directory: Path, tmp_path: Path) -> None:
    """What torch remembers of a mesh (which shard is mine) must not outlive its group: the learner whose first rank
    died is built again on the worker of another rank."""
    [(second, first)] = on_ranks(2, directory, partial(change_places, directory, str(tmp_path)))
    one = make_learner(directory, **DECOUPLED)
    for version in (0, 1):
        one.update(make_batch(version), version)
    assert second == {}
    assert_close(one.tensors(), first)


def join(meeting: Rendezvous) -> ProcessRanks:
    return ProcessRanks(0, 1, meeting.address, device="cpu", timeout_s=TIMEOUT_S, store=meeting.store)


def test_a_group_whose_member_was_dropped_makes_room_and_another_one_does_not() -> None:
    """As when the first rank's process, or the run's driver, is killed between two updates: Dask drops the actors of
    the other ranks, whose processes torch.distributed still counts as members of the group."""
    member = join(Rendezvous("127.0.0.1", 1, TIMEOUT_S))
    try:
        with pytest.raises(InfrastructureFailure, match="already belongs to a group of 1 ranks; another run"):
            join(Rendezvous("127.0.0.1", 1, TIMEOUT_S))
        held: list[object] = [member]
        held.append(held)  # what an actor holds goes in cycles
        del member, held
        member = join(Rendezvous("127.0.0.1", 1, TIMEOUT_S))
        assert member.sum(torch.ones(())) == 1.0 and member.gather("here") == ["here"]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@given(tokens=st.lists(st.integers(1, 500), max_size=40), num_ranks=st.integers(1, 6))
def test_rows_are_dealt_once_and_evenly(tokens: list[int], num_ranks: int) -> None:
    shares = deal_to_ranks(tokens, num_ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(tokens)))
    loads = [sum(tokens[index] for index in share) for share in shares]
    if tokens:
        assert max(loads) - min(loads) <= max(tokens)
