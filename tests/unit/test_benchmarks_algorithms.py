"""The matrix of algorithms: every cell is a valid configuration, and finished runs are never run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.algorithms import CELLS, DEFAULT, advice, collapsed, headline_of, summarise_cells, training_of
from benchmarks.resumable_runs import QUICKSTART, RunFile
from flows.combinations import check_combinations
from flows.config import load_run_file
from tasks.training.plugins import ESTIMATORS, LOSSES


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_is_a_valid_run(cell: str) -> None:
    config = load_run_file(QUICKSTART)
    training = training_of(cell, config.training)
    check_combinations(config.model_copy(update={"training": training}))
    assert (training == config.training) == (cell == DEFAULT)


def test_every_estimator_and_every_loss_has_a_cell() -> None:
    base = load_run_file(QUICKSTART).training
    chosen = [training_of(cell, base) for cell in CELLS]
    assert {training.advantage.estimator for training in chosen} == set(ESTIMATORS)
    assert {training.loss.name for training in chosen} == set(LOSSES)


def run(cell: str, seed: int, success: float, *, lost: bool = False, alpha: int = 0) -> dict[str, Any]:
    """``lost``: the mean is what it is, but one family ends below half of what it began with."""
    start = {"maze": 0.4, "sums": 0.4}
    final = {"maze": 0.19, "sums": 2 * success - 0.19} if lost else {"maze": success, "sums": success}
    found = {"final_success": success, "start_by_family": start, "by_family": final, "failed": ""}
    return {"cell": cell, "alpha": alpha, "seed": seed, **found}


RUNS = [run(DEFAULT, 0, 0.8), run(DEFAULT, 1, 0.7), run("tis", 0, 0.82), run("kimi", 0, 0.9, lost=True)]


def test_rows_are_means_over_seeds_and_count_collapses() -> None:
    default, tis, kimi = summarise_cells(RUNS, [0, 2])
    assert default["success, alpha 0"] == pytest.approx(0.75) and default["lowest, alpha 0"] == 0.7
    assert default["collapses, alpha 0"] == "0 of 2" and kimi["collapses, alpha 0"] == "1 of 1"
    assert tis["algorithm"] == "tis" and "success, alpha 2" not in tis
    assert headline_of(RUNS, [0, 2]).keys() == {"default_success_alpha_0", "best_success_alpha_0"}


def test_a_run_collapses_when_a_family_is_lost_or_training_ends_early() -> None:
    assert not collapsed(run("tis", 0, 0.2)), "just half of it is left"
    assert collapsed(run("tis", 0, 0.9, lost=True)) and collapsed(run("tis", 0, 0.9) | {"failed": "not finite"})


def test_advice_is_by_the_interval_over_paired_seeds() -> None:
    def runs_of(cell: str, *finals: float, lost: bool = False) -> list[dict[str, Any]]:
        return [run(cell, seed, final, lost=lost) for seed, final in enumerate(finals)]

    runs = [
        *runs_of(DEFAULT, 0.80, 0.70, 0.75),
        *runs_of("gspo", 0.90, 0.80, 0.86),
        *runs_of("kimi", 0.90, 0.80, 0.86, lost=True),
        *runs_of("tis", 0.60, 0.50, 0.56),
        *runs_of("rloo", 0.95, 0.60, 0.80),
        *runs_of("topr", 0.9),
    ]
    # Differences 0.10, 0.10, 0.11: mean 0.1033, 4.303 * 0.005774 / sqrt(3) = 0.0143 on either side.
    assert advice(runs, [0, 2]) == (
        "alpha 0: above the default: gspo (+0.103, +0.089 to +0.118), "
        "below the default: tis (-0.197, -0.211 to -0.182); collapsed: kimi; no difference shown for 2 of 4"
    )
    assert advice(runs_of("tis", 0.9, 0.9) + runs_of(DEFAULT, 0.8), [0]) == "", "one pair says nothing"
    (default, *others) = summarise_cells(runs, [0])
    assert default["beside default, alpha 0"] == ""
    assert {row["algorithm"]: row["beside default, alpha 0"] for row in others}["gspo"] == "+0.103, +0.089 to +0.118"


def test_finished_runs_are_kept_one_by_one(tmp_path: Path) -> None:
    runs = RunFile(tmp_path / "folder" / "runs.jsonl")
    assert runs.rows() == []
    for each in RUNS:
        runs.append(each)
    assert RunFile(runs.path).rows() == RUNS
