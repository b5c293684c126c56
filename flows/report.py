"""What a run shows in the Prefect UI and leaves behind: progress, learning curve, a link to its files, summary."""

from __future__ import annotations

import base64
import statistics
from typing import Any, cast
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)

from flows.config import EvaluationConfig, RunConfig
from flows.progress import RunProgress, summary_table
from resources.rewards.autoscaler_thread import AutoscalerThread
from resources.runs import RunRef, evaluation_key
from resources.telemetry.curve import learning_curve_png
from resources.telemetry.metrics import read_metrics

SETTLED_ITERATIONS = 5
"""After so many iterations their median is what the reward pool's times are compared with."""


class RunReport:
    """The artifacts of one run."""

    def __init__(self, run: RunRef, config: RunConfig) -> None:
        self._run = run
        self._config = config
        self._iterations_s: list[float] = []
        self._last_error: str | None = None
        # Prefect annotates these functions as sync or async; called from a synchronous flow they return plainly.
        self._progress = cast(
            UUID,
            create_progress_artifact(0.0, key=f"progress-{run.run_id}", description=f"Iterations of run {run.run_id}"),
        )
        create_link_artifact(
            run.folder().url,
            link_text="files of the run",
            key=f"store-{run.run_id}",
            description="The run's folder",
        )

    def iteration(self, row: dict[str, Any], autoscaler: AutoscalerThread | None) -> None:
        """Move the progress artifact; say in the log what goes wrong or will cost time on the reward pool."""
        if autoscaler is not None:
            self._watch_rewards(row["time/iteration_s"], autoscaler)
        update_progress_artifact(self._progress, 100.0 * (row["iteration"] + 1) / self._config.num_iterations)

    def _watch_rewards(self, iteration_s: float, autoscaler: AutoscalerThread) -> None:
        if autoscaler.last_error is not None and autoscaler.last_error != self._last_error:
            get_run_logger().warning("reward replicas: %s", autoscaler.last_error)
        self._last_error = autoscaler.last_error
        self._iterations_s.append(iteration_s)
        if len(self._iterations_s) == SETTLED_ITERATIONS:  # the first ones hold cold starts
            warning = self._config.rewards.keep_alive_warning(statistics.median(self._iterations_s))
            if warning is not None:
                get_run_logger().warning("%s", warning)

    def finish(
        self, before: dict[str, Any] | None, after: dict[str, Any] | None, wall_s: float, progress: RunProgress
    ) -> dict[str, Any]:
        """Write ``summary.json`` and the learning curve; print the closing table. Returns the summary."""
        rows = read_metrics(self._run.folder())
        families = list(self._config.families)
        summary = {
            "run_id": self._run.run_id,
            "families": families,
            "success_before": _by_family(before),
            "success_after": _by_family(after),
            "wall_s": wall_s,
            "num_iterations": len(rows),
            "num_trajectories": sum(row["num_trajectories"] for row in rows),
            "num_tokens": sum(row["num_tokens"] for row in rows),
            "store": self._run.folder().url,
        }
        folder = self._run.folder()
        folder.put_json("summary.json", summary)
        png = learning_curve_png(rows, families, title=f"run {self._run.run_id}")
        folder.put("learning_curve.png", png)
        create_markdown_artifact(
            # A data URI, so that the picture shows whatever store the run wrote to.
            f"![learning curve](data:image/png;base64,{base64.b64encode(png).decode()})",
            key=f"curve-{self._run.run_id}",
            description="Mean reward by task family",
        )
        progress.show(summary_table(summary))
        progress.say(f"files: {summary['store']}")
        return summary


def _by_family(evaluation: dict[str, Any] | None) -> dict[str, float] | None:
    return None if evaluation is None else {**evaluation["success"], "mean": evaluation["mean"]}


def read_evaluation(run: RunRef, version: int, settings: EvaluationConfig) -> dict[str, Any] | None:
    """The evaluation of a version as it was written, so that a resumed run still knows where it began.

    None when there is none, or when somebody has measured the version otherwise since (`flows.evaluation.evaluate` with
    other episodes, or greedily): a number that cannot be compared is not shown beside the others.
    """
    key = evaluation_key(version)
    if not run.folder().exists(key):
        return None
    measured = run.folder().get_json(key)
    episodes = {measured["num_episodes"][family] + measured["unscored"][family] for family in measured["success"]}
    return measured if (measured["greedy"], episodes) == (settings.greedy, {settings.num_episodes}) else None
