"""Libraries of environments that bring much with them, and where the tests find them.

skyrl-gym and openenv need pandas, and where pandas can be imported pyarrow does it, in every process: 50 MiB and up to
two seconds each. So `make test` installs them into a virtual environment of its own, on top of the one that the tests
run in, and only the tests that play them look there.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "adapters"


def is_there(package: str) -> bool:
    """Whether a package can be imported, here or in the environment on top."""
    return importlib.util.find_spec(package) is not None or _is_on_top(package)


def interpreter_with(package: str) -> str | None:
    """A Python that can import a package; None when there is none."""
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    return str(FOLDER / "bin" / "python") if _is_on_top(package) else None


def _is_on_top(package: str) -> bool:
    return any(FOLDER.glob(f"lib/python*/site-packages/{package}/__init__.py"))
