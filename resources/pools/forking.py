"""When are workers forked from one process that has imported everything, and how?

Python's fork server imports the modules once; workers then start within milliseconds and share the memory of what was
imported. Measured with the five workers of a one-machine run, torch included, on two busy cores: 6 instead of 19
seconds of CPU, 14 instead of 33 seconds until everything was imported, 0.5 instead of 1.1 GB.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

from distributed.utils import get_mp_context

from resources.hardware import HardwareClass
from resources.pools.spec import worker_environment


def common_environment(classes: Mapping[str, HardwareClass], env: Mapping[str, str]) -> dict[str, str] | None:
    """The environment of all workers, when they can come from one process: on Linux, with equal variables (libraries
    read them when they are imported), and without accelerators (a driver that a library has touched does not survive a
    fork). None otherwise: every worker then starts an interpreter of its own."""
    used = [hardware_class for hardware_class in classes.values() if hardware_class.num_workers]
    environments = [worker_environment(hardware_class, env) for hardware_class in used]
    is_alike = all(each == environments[0] for each in environments)
    if sys.platform == "linux" and used and is_alike and all(each.device == "cpu" for each in used):
        return environments[0]
    return None


def prepare_fork_server(environment: Mapping[str, str], modules: Iterable[str]) -> None:
    """Let the fork server, when the first worker starts it, have this environment and these modules.

    A module that does not import is left to the workers that need it: their error says why.
    """
    context = get_mp_context()  # the first call names what Dask itself wants imported; ours replaces that
    assert context.get_start_method() == "forkserver", "the caller sets Dask's multiprocessing method first"
    os.environ.update(environment)
    context.set_forkserver_preload(["distributed", *modules])
