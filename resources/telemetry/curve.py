"""The learning curve as a picture."""

from __future__ import annotations

import io
from typing import Any


def learning_curve_png(rows: list[dict[str, Any]], families: list[str], title: str) -> bytes:
    """Mean reward by family over iterations, and staleness below it.

    ``rows``: metrics rows with ``iteration``, ``reward/<family>`` and ``staleness/mean``. Returns PNG bytes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    steps = [row["iteration"] for row in rows]
    for family in families:
        values = [row.get(f"reward/{family}") for row in rows]
        upper.plot(steps, [float("nan") if v is None else v for v in values], label=family, linewidth=1.2)
    upper.set_ylabel("mean reward")
    upper.set_title(title)
    upper.legend(loc="lower right", fontsize="small")
    lower.plot(steps, [row.get("staleness/mean") or 0.0 for row in rows], color="grey")
    lower.set_ylabel("staleness")
    lower.set_xlabel("iteration")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
