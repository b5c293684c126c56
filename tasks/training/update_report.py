"""What a learner says of one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class UpdateReport:
    version: int
    """The version that the learner holds now."""
    metrics: dict[str, Any]
    """Flat names to finite numbers, and ``notes``, when there is something to say, to a list of sentences."""
    optimizer_steps: int
    """Steps of this update; 0 when it was skipped."""
    skipped: str | None = None
    """Why no step was taken; None when one was."""
