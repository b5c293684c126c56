"""The training benchmark: the plain loop trains what the learner trains; bounds and ratios are those of the rows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from benchmarks.training import check_agreement, flop_per_token, headline, one_group_each, ratio, table
from benchmarks.training_processes import TimedUpdate, VariantProcesses
from benchmarks.training_rows import Workload, play_groups, prepare, with_logprobs
from benchmarks.training_variants import PACKED, PADDED, PLAIN, SORTED, VARIANTS, UpdateResult, minibatches_of
from flows.config import RunConfig
from resources.engines.local_layout import read_layout
from resources.environments.registry import quickstart_families
from tasks.training.config import OptimizerConfig, TrainingConfig
from tasks.warm_start.config import WarmStartConfig
from tests.model_directories import write_model
from tests.unit.test_tasks_training_row import make_row

LENGTHS = (6, 20, 9, 14)


@pytest.fixture(scope="module")
def workload(tmp_path_factory) -> Workload:
    directory = write_model(tmp_path_factory.mktemp("model"))
    rows = [
        make_row(index, group=f"g{number}", reward=float(index), length=length, trained=(3, 4, length - 1))
        for number, length in enumerate(LENGTHS)
        for index in range(2)
    ]
    training = TrainingConfig(minibatches=2, optimizer=OptimizerConfig(learning_rate=1e-3))
    return prepare(str(directory), training, with_logprobs(rows, Path(directory), training))


def test_every_variant_takes_the_same_update(workload: Workload) -> None:
    """Four optimizer steps each: a difference in loss, weights of tokens, clip or optimizer would show."""
    results = {}
    for variant in VARIANTS:
        update = variant.build(workload)
        results[variant.name] = [update(version) for version in range(2)]
    packed = results[PACKED.name]
    assert packed[0] != packed[1]
    for name, of_variant in results.items():
        for mine, theirs in zip(packed, of_variant, strict=True):
            assert theirs.loss == pytest.approx(mine.loss, rel=1e-3, abs=1e-6), name
            assert theirs.grad_norm == pytest.approx(mine.grad_norm, rel=1e-3), name


def test_rows_carry_the_policys_own_logprobs(workload: Workload) -> None:
    row = workload.rows[0]
    assert (row.behaviour_logprobs[row.loss_mask] < 0).all()
    assert not row.behaviour_logprobs[~row.loss_mask].any()


def test_padding_is_counted_as_it_is_laid_out(workload: Workload) -> None:
    lengths = sorted(workload.lengths)
    assert lengths == sorted([*LENGTHS, *LENGTHS])
    assert PACKED.laid_out_tokens(workload) == sum(lengths)
    by_hand = 0
    for rows in minibatches_of(workload):
        in_minibatch = [len(workload.rows[row].token_ids) for row in rows]
        by_hand += len(in_minibatch) * max(in_minibatch)
    assert PADDED.laid_out_tokens(workload) == PLAIN.laid_out_tokens(workload) == by_hand
    assert sum(lengths) <= SORTED.laid_out_tokens(workload) <= by_hand


def timed(*seconds: float, loss: float = 1.0) -> list[TimedUpdate]:
    return [TimedUpdate(UpdateResult(loss, 2.0), wall, wall / 2) for wall in seconds]


def test_ratios_are_medians_of_neighbours() -> None:
    """The third repetition ran while the machine was busy, and hit both alike."""
    assert ratio({"a": timed(1.0, 2.0, 40.0), "b": timed(3.0, 5.0, 120.0)}, "a", "b") == 3.0


def test_a_variant_that_trains_something_else_is_refused() -> None:
    check_agreement({PACKED.name: timed(1.0)[0], PLAIN.name: timed(2.0, loss=1.0005)[0]})
    with pytest.raises(RuntimeError, match=r"loss of the first update is 1\.01 for 'transformers, padded'"):
        check_agreement({PACKED.name: timed(1.0)[0], PLAIN.name: timed(2.0, loss=1.01)[0]})


def test_the_headline_stands_beside_its_bounds(workload: Workload) -> None:
    names = [*(variant.name for variant in VARIANTS), "packed, 2 ranks"]
    updates = {name: timed(2.0, 2.0, 2.0) for name in names}
    updates[PACKED.name] = timed(1.0, 1.0, 1.0)
    peaks = {name: 2**20 * (1 if name == PACKED.name else 3) for name in names}
    numbers = headline(workload, updates, peaks)
    tokens = sum(workload.lengths)
    assert numbers["packed_vs_padded"]["value"] == 2.0
    assert numbers["packed_vs_padded"]["bound"] == pytest.approx(PADDED.laid_out_tokens(workload) / tokens)
    assert numbers["packed_tokens_per_s"]["value"] == tokens
    assert numbers["padded_vs_packed_peak_memory"]["value"] == 3.0
    assert numbers["two_ranks_vs_one"]["value"] == 0.5
    rows = table(workload, updates, peaks, 100.0)
    assert [row["variant"] for row in rows] == names
    assert [row["arithmetic bound tok/s"] for row in rows] == [100.0] * 4 + [200.0]


def test_flop_of_a_token_by_hand(workload: Workload) -> None:
    layout = read_layout(Path(workload.directory))
    head = layout.hidden_size * layout.vocab_size
    pairs = sum(length * (length + 1) // 2 for length in workload.lengths)
    attention = 12 * layout.num_layers * layout.num_heads * layout.head_dim * pairs
    expected = 6 * (layout.num_parameters - head) * sum(workload.lengths) + 6 * head * workload.num_trained + attention
    assert flop_per_token(layout, workload) * sum(workload.lengths) == pytest.approx(expected)


async def groups_of(seed: int) -> list[list[dict]]:
    families = {name: family for name, family in quickstart_families().items() if name == "guess_number"}
    return [
        [dict(message) for transcript in members for message in transcript.messages]
        for members in (await play_groups(families, WarmStartConfig(), seed)).values()
    ]


def test_the_same_seed_gives_the_same_rows() -> None:
    first = asyncio.run(groups_of(0))
    assert first == asyncio.run(groups_of(0)) != asyncio.run(groups_of(1))
    assert len(first) == quickstart_families()["guess_number"].groups_per_iteration


def test_quick_keeps_every_family() -> None:
    config = one_group_each(RunConfig(families=quickstart_families()))
    assert {family.groups_per_iteration for family in config.families.values()} == {1}
    assert config.families.keys() == quickstart_families().keys()


def test_a_process_of_its_own_answers_and_is_gone_afterwards(workload: Workload) -> None:
    with VariantProcesses(PLAIN, workload) as processes:
        first = processes.update(0)
        assert np.isfinite(first.result.loss)
        assert first.cpu_s > 0
        assert processes.peak_bytes() >= 0
        children = list(processes._processes)
    assert all(child.exitcode == 0 for child in children)
