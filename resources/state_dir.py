"""Where this installation keeps its state: Prefect's database, logs, and the default object store."""

from __future__ import annotations

import os
from pathlib import Path


def state_dir() -> Path:
    """``$ROLLART_STATE_DIR``, else ``.rollart`` beside the packages (the checkout, with an editable install)."""
    return Path(os.environ.get("ROLLART_STATE_DIR") or Path(__file__).resolve().parent.parent / ".rollart").absolute()
