"""The benchmark of reward scales: valid cells, every reward scaled, and a null result called one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.algorithms_loop import scaled
from benchmarks.resumable_runs import QUICKSTART
from benchmarks.reward_scales import CELLS, NORMALISED, PLAIN, SCALES, SMALLEST, compare, summarise_scales, training_of
from flows.combinations import check_combinations
from flows.config import load_run_file
from tasks.training.row import TurnSpan
from tests.unit.test_tasks_training_row import make_row


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_is_a_valid_run_of_the_scaled_families(cell: str) -> None:
    config = load_run_file(QUICKSTART)
    assert set(SCALES) == set(config.families) and sorted(set(SCALES.values())) == [0.1, 1.0, 10.0]
    check_combinations(config.model_copy(update={"training": training_of(cell, config.training)}))


def test_all_rewards_of_a_row_are_scaled_and_nothing_else() -> None:
    row = make_row(0, reward=0.5)
    row = replace(row, turns=(TurnSpan(0, 1, 2, 0.25),), reward_components={"format": 1.0})
    found = scaled(row, 10.0)
    assert (found.reward, found.turns[0].reward, found.reward_components) == (5.0, 2.5, {"format": 10.0})
    assert replace(found, reward=row.reward, turns=row.turns, reward_components=row.reward_components) == row
    assert scaled(replace(row, reward=None), 10.0).reward is None


def run(cell: str, seed: int, small: float) -> dict[str, Any]:
    """Every family but the one of the smallest rewards gains 0.4."""
    start = dict.fromkeys(SCALES, 0.4)
    final = {name: small if name == SMALLEST else 0.8 for name in SCALES}
    return {"cell": cell, "seed": seed, "start_by_family": start, "by_family": final, "final_success": 0.7}


def test_a_difference_is_told_and_a_null_is_called_one() -> None:
    plain = [run(PLAIN, seed, 0.42 + 0.01 * seed) for seed in range(3)]
    better = [run(NORMALISED, seed, 0.62 + 0.01 * seed + 0.002 * (seed == 1)) for seed in range(3)]
    headline, verdict = compare([*plain, *better])
    assert headline["added_gain_worst_family"]["value"] == pytest.approx(0.2 + 0.002 / 3)
    assert headline[f"added_gain_{SMALLEST}_low"]["value"] > 0.19 and "no difference" not in verdict
    level = [run(NORMALISED, seed, [0.40, 0.43, 0.46][seed]) for seed in range(3)]
    assert "no difference is shown" in compare([*plain, *level])[1]
    assert compare(plain) == ({}, "")
    row = summarise_scales(plain)[0]
    assert (
        row["seeds"] == 3
        and row["worst gain"] == pytest.approx(0.03)
        and row["lowest worst gain"] == pytest.approx(0.02)
    )
