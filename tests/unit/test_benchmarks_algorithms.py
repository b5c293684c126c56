"""The matrix of algorithms: every cell is a valid configuration, and finished runs are never run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.algorithms import CELLS, DEFAULT, advice, headline_of, summarise_cells, training_of
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


def run(cell: str, seed: int, success: float, *, collapsed: bool = False, alpha: int = 0) -> dict[str, Any]:
    return {"cell": cell, "alpha": alpha, "seed": seed, "final_success": success, "collapsed": collapsed}


RUNS = [run(DEFAULT, 0, 0.8), run(DEFAULT, 1, 0.7), run("tis", 0, 0.82), run("kimi", 0, 0.9, collapsed=True)]


def test_rows_are_means_over_seeds_and_count_collapses() -> None:
    default, tis, kimi = summarise_cells(RUNS, [0, 2])
    assert default["success, alpha 0"] == pytest.approx(0.75) and default["lowest, alpha 0"] == 0.7
    assert default["collapses, alpha 0"] == "0 of 2" and kimi["collapses, alpha 0"] == "1 of 1"
    assert tis["algorithm"] == "tis" and "success, alpha 2" not in tis
    assert headline_of(RUNS, [0, 2]).keys() == {"default_success_alpha_0", "best_success_alpha_0"}


def test_a_cell_that_collapsed_is_never_advised() -> None:
    collapsed = [run("kimi", seed, 0.9, collapsed=seed == 1) for seed in range(2)]
    assert "best tis" in advice([run("tis", 0, 0.82), run("tis", 1, 0.81), *collapsed, run(DEFAULT, 0, 0.99)], [0, 2])
    assert advice(RUNS[2:], [0]) == "", "one seed says nothing"
    level = [run(DEFAULT, 0, 0.8), run(DEFAULT, 1, 0.8), run("tis", 0, 0.9), run("tis", 1, 0.72)]
    assert advice(level, [0]) == (
        f"alpha 0: best tis (0.810); within its standard error 0.090: {DEFAULT}, tis; the default is among them"
    )


def test_finished_runs_are_kept_one_by_one(tmp_path: Path) -> None:
    runs = RunFile(tmp_path / "folder" / "runs.jsonl")
    assert runs.rows() == []
    for each in RUNS:
        runs.append(each)
    assert RunFile(runs.path).rows() == RUNS
