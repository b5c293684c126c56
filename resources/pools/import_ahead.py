"""How does a worker import what takes seconds before anything there needs it, without two threads importing at once?"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable

_one_at_a_time = threading.Lock()
"""Of the process, whichever runs it serves: what it guards, the table of imported modules, is the process's too."""


def import_all(names: Iterable[str]) -> None:
    """Import modules (``package.module``) and names in them (``transformers:AutoConfig``), one call after the other.

    Two threads that import transformers at once break its lazy modules ("cannot import name ..."), so everybody who
    shares a worker calls this, and waits for it, before anything else imports there. Returns nothing: a module that
    came back to the caller would be imported in its process.
    """
    with _one_at_a_time:
        for name in names:
            module, _, attribute = name.partition(":")
            imported = importlib.import_module(module)
            if attribute:
                getattr(imported, attribute)
