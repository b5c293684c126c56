"""What a person sees on the terminal while a run goes on: a live table, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PLAIN_PERIOD_S = 10.0
"""Without a terminal (a log file), at most one line in this time."""


class RunProgress:
    """Context manager around the iterations of a run."""

    def __init__(self, families: list[str], num_iterations: int, done: int = 0, console: Console | None = None) -> None:
        self._families = families
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("iterations", total=num_iterations, completed=done)
        self._live = Live(self._bar, console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._last_line = 0.0

    def __enter__(self) -> RunProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One line that stays on the screen, never cut: paths and addresses are there to be copied."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def show(self, table: Table) -> None:
        """A table that stays on the screen, below the live part."""
        self._console.print(table)

    def iteration(self, row: dict[str, Any], replicas: int) -> None:
        """Show a finished iteration's metrics row."""
        self._bar.update(self._task, completed=row["iteration"] + 1)
        if self._live is not None:
            self._live.update(Group(self._table(row, replicas), self._bar))
        elif time.monotonic() - self._last_line >= PLAIN_PERIOD_S:
            self._last_line = time.monotonic()
            rewards = "  ".join(f"{f} {_number(row.get(f'reward/{f}'))}" for f in self._families)
            self.say(
                f"iteration {row['iteration'] + 1}: reward {rewards}  staleness {_number(row.get('staleness/mean'))}  "
                f"{_number(row.get('tokens_per_s'), 0)} tok/s  {replicas} reward replicas  "
                f"{_number(row.get('time/iteration_s'))} s"
            )

    def _table(self, row: dict[str, Any], replicas: int) -> Table:
        table = Table(title=f"iteration {row['iteration'] + 1}", title_justify="left")
        table.add_column("task family")
        for column in ("reward", "success", "dead groups", "trajectories"):
            table.add_column(column, justify="right")
        for family in self._families:
            table.add_row(
                family,
                _number(row.get(f"reward/{family}")),
                _number(row.get(f"success/{family}")),
                _number(row.get(f"dead_group_share/{family}")),
                _number(row.get(f"num_trajectories/{family}"), 0),
            )
        table.caption = (
            f"staleness {_number(row.get('staleness/mean'))} (max {_number(row.get('staleness/max'), 0)})   "
            f"{_number(row.get('tokens_per_s'), 0)} tokens/s   reward replicas {replicas}   "
            f"iteration {_number(row.get('time/iteration_s'))} s"
        )
        return table


def summary_table(summary: dict[str, Any]) -> Table:
    """The closing table: success before and after by family, and what it took."""
    table = Table(title=f"run {summary['run_id']}", title_justify="left")
    table.add_column("task family")
    table.add_column("success before", justify="right")
    table.add_column("success after", justify="right")
    before, after = summary.get("success_before") or {}, summary.get("success_after") or {}
    for family in [*summary["families"], "mean"]:
        table.add_row(family, _number(before.get(family)), _number(after.get(family)), end_section=family == "mean")
    table.add_row("wall time", "", f"{summary['wall_s']:.0f} s")
    table.add_row("trajectories", "", f"{summary['num_trajectories']:,}")
    table.add_row("tokens", "", f"{summary['num_tokens']:,}")
    return table


def _number(value: Any, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
