"""One model at a time is built in a process: transformers swaps global state meanwhile (where new tensors live, how
they are initialised), and a second thread would build on the other's."""

from __future__ import annotations

import threading

ONE_AT_A_TIME = threading.Lock()
"""Held while a model is built or loaded; two runs may share a learner's worker process."""
