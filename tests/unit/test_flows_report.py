"""What a resumed run knows of its beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.config import EvaluationConfig
from flows.report import read_evaluation
from resources.runs import RunRef, evaluation_key

MEASURED = {
    "version": 0,
    "greedy": False,
    "success": {"lake": 0.25, "sums": 0.5},
    "num_episodes": {"lake": 8, "sums": 7},
    "unscored": {"lake": 0, "sums": 1},
    "mean": 0.375,
}


@pytest.fixture
def run(tmp_path: Path) -> RunRef:
    return RunRef(run_id="run", store_url=str(tmp_path))


def test_the_evaluation_before_training_is_read_again(run: RunRef) -> None:
    """Unscored episodes were asked for as well."""
    settings = EvaluationConfig(num_episodes=8)
    assert read_evaluation(run, 0, settings) is None
    run.folder().put_json(evaluation_key(0), MEASURED)
    assert read_evaluation(run, 0, settings) == MEASURED


@pytest.mark.parametrize("otherwise", [{"greedy": True}, {"num_episodes": {"lake": 4, "sums": 4}}])
def test_what_was_measured_otherwise_is_no_beginning(run: RunRef, otherwise: dict[str, Any]) -> None:
    """The flow `evaluate` writes to the same place, with settings of its own."""
    run.folder().put_json(evaluation_key(0), MEASURED | otherwise)
    assert read_evaluation(run, 0, EvaluationConfig(num_episodes=8)) is None
