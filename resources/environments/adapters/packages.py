"""How does an adapter get at code that may not be there: an optional package, or a function that the run file names?"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from types import ModuleType
from typing import Any


def import_optional(module: str, extra: str) -> ModuleType:
    """The module of an optional package. Raises ValueError naming the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"the package {module!r} does not import ({error}); install it in every process of the run with "
            f"pip install 'rollart[{extra}]'"
        ) from error


def adapter_version(adapter: str, distribution: str) -> str:
    """An ``env_version``: another release of the package may give another episode for the same seed."""
    return f"{adapter}/{distribution}-{importlib.metadata.version(distribution)}"


def import_function(path: str, field: str) -> Callable[..., Any]:
    """The function behind ``package.module:function``. Raises ValueError naming the argument."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"{field} is {path!r}; it must be an import path 'package.module:function'")
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ValueError(f"{field} is {path!r}; its module does not import ({error})") from error
    if not callable(function):
        raise ValueError(f"{field} is {path!r}; {module_name!r} has no function {name!r}")
    return function
