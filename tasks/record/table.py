"""The per-family table of an iteration, for the Prefect UI."""

from __future__ import annotations

from typing import Any


def family_table(row: dict[str, Any], families: list[str]) -> list[dict[str, Any]]:
    """One line a family from a metrics row with keys ``<metric>/<family>``; what a family lacks is left blank."""
    columns = (
        "reward",
        "success",
        "dead_group_share",
        "num_groups",
        "num_trajectories",
        "trained_tokens",
        "evicted_groups",
    )
    return [
        {"family": family, **{column: _short(row.get(f"{column}/{family}")) for column in columns}}
        for family in families
    ]


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else ("" if value is None else value)
