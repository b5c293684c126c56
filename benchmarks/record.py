"""How every benchmark reports: a table for people, and ``benchmarks/results/NAME.json`` for machines."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
LOG_WIDTH = 240


class HeadlineNumber(TypedDict):
    """One named result. ``bound`` is what physics (or perfect parallelism) allows, None where it says nothing."""

    value: float
    bound: float | None
    unit: str


def headline_number(value: float, unit: str, bound: float | None = None) -> HeadlineNumber:
    return HeadlineNumber(value=float(value), bound=None if bound is None else float(bound), unit=unit)


def median(values: Sequence[float]) -> float:
    """Median of repeated measurements; ValueError when there are none."""
    if not values:
        raise ValueError("median of no measurements: run at least one repetition")
    return float(statistics.median(values))


def describe_machine() -> dict[str, Any]:
    """The machine and the versions that the numbers depend on."""
    versions = {}
    for package in ("torch", "transformers", "prefect", "distributed", "pyarrow", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "platform": platform.platform(),
        "processor": _processor_name(),
        "num_cpus": os.cpu_count(),
        "load_average_1min": os.getloadavg()[0],
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "versions": versions,
    }


def record(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    headline: Mapping[str, HeadlineNumber],
    *,
    notes: str = "",
    results: Path = RESULTS,
) -> Path:
    """Print ``rows`` and ``headline``, and write ``<results>/<name>.json`` (atomic replace). Returns the path.

    Rows are flat mappings of JSON-able values; columns are the union of their keys in order of appearance.
    """
    # Where nobody's window sets a width (a log file), a table is as wide as it needs to be read.
    console = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    console.print(_rows_table(name, rows))
    console.print(_headline_table(headline))
    if notes:
        console.print(notes)
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}.json"
    document = {
        "name": name,
        "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": describe_machine(),
        "headline": dict(headline),
        "rows": [dict(row) for row in rows],
        "notes": notes,
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    temporary.replace(path)
    console.print(f"written to {path}")
    return path


def _rows_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=name)
    for column in columns:
        numeric = all(isinstance(row.get(column, 0), (int, float)) for row in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return table


def _headline_table(headline: Mapping[str, HeadlineNumber]) -> Table:
    table = Table(title="headline")
    for column in ("name", "value", "bound", "unit"):
        table.add_column(column, justify="right" if column in ("value", "bound") else "left")
    for key, number in headline.items():
        table.add_row(key, _cell(number["value"]), _cell(number["bound"]), number["unit"])
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
