"""Which processes make up a cluster, how are they tagged, and with which environment do they start?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distributed import Nanny

from resources.hardware import HardwareClass, Role

SLOTS: dict[Role, int] = {"engine": 1, "learner": 1, "environment": 4, "control": 8}
"""Stage tasks that a worker of a role runs at once: one on an accelerator slot, several where stages mostly wait."""
SPARE_THREADS = 2
"""Threads beyond the slots: actors are built and workers are inspected while every slot is taken."""


def worker_specs(
    classes: Mapping[str, HardwareClass], *, env: Mapping[str, str], preload_modules: Iterable[str], host: str
) -> dict[str, dict[str, Any]]:
    """One nanny and worker process per accelerator slot, by name (``compute-0``), for `distributed.SpecCluster`.

    Memory is not limited by Dask: a worker that nears a limit would be paused or killed with the engine that it hosts.
    """
    return {
        f"{name}-{index}": {
            "cls": Nanny,
            "options": {
                "name": f"{name}-{index}",
                "host": host,
                "nthreads": SLOTS[hardware_class.role] + SPARE_THREADS,
                "resources": {name: SLOTS[hardware_class.role]},
                "memory_limit": 0,
                "preload": list(preload_modules),
                "env": worker_environment(hardware_class, env),
            },
        }
        for name, hardware_class in classes.items()
        for index in range(hardware_class.num_workers)
    }


KEEP_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
"""Let glibc keep freed memory. Without this an update of the tiny policy took 1.4 s instead of 0.9 s. The likely
reason, which was not looked at in a profile: actors run outside the main thread, where glibc gives large blocks back
at once."""


def worker_environment(hardware_class: HardwareClass, env: Mapping[str, str]) -> dict[str, str]:
    """Variables of a worker process. What the caller gives wins.

    Threads of several processes that spin for work while they share cores slow each other down many times over, hence
    the passive wait. Standard logging of these rooms reaches the flow run; threads outside any run stay silent.
    """
    threads = str(hardware_class.torch_threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        **KEEP_FREED_MEMORY,
        "PREFECT_LOGGING_EXTRA_LOGGERS": "resources,tasks",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        **env,
    }


def dask_settings(no_workers_timeout_s: float) -> dict[str, Any]:
    """Dask configuration that must hold before the scheduler and the nannies start.

    A task whose worker died fails at once instead of running again behind Prefect's back; a task whose class has lost
    its workers fails after a while instead of waiting for ever; worker processes may have children. Dask's own profiler
    is off: it looks into every worker a hundred times a second, and keeps an hour of what it saw. Its other histories
    are kept short, so that the scheduler does not grow with a run.
    """
    return {
        "distributed.scheduler.allowed-failures": 0,
        "distributed.scheduler.no-workers-timeout": f"{no_workers_timeout_s:g}s",
        # A process that is started anew and is not back by then is closed for good. Dask's own 15 s are less than the
        # imports of a worker on a busy machine take.
        "distributed.deploy.lost-worker-timeout": "120s",
        "distributed.worker.daemon": False,
        "distributed.worker.profile.enabled": False,
        "distributed.admin.log-length": 50,
        "distributed.admin.low-level-log-length": 20,
        "distributed.admin.system-monitor.log-length": 10,
        "distributed.diagnostics.computations.max-history": 5,
        "distributed.comm.timeouts.tcp": "30s",
    }
