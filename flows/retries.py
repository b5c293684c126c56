"""A stage that lost its worker, or an actor that it called, is run again once the run is whole.

Prefect's own retries never apply there: what Dask cannot run never reaches Prefect's engine. What the stage itself
raises, and a deadline that passed, are no losses and end the iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from prefect import Task, get_run_logger

from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.recovery.whole import wait_until_whole
from resources.runs import RunRef

PAUSE_S = 0.5
"""Before it is asked who is missing: a loss is known to everybody by then."""


def run_stage(
    stage: Task[..., Any],
    run: RunRef,
    *arguments: Any,
    retries: int,
    recovery_s: float,
    wait: Callable[[str, float], Any] = wait_until_whole,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """The result of ``stage(run, *arguments)``, run again at most ``retries`` times.

    Stages are made for it: a batch is trained once per version, publications and records replace themselves.

    Args:
        recovery_s: longest wait for the run to be whole again, in seconds.

    Raises what the last attempt raised, or why the run cannot be made whole.
    """
    for attempt in range(retries + 1):
        try:
            return stage.submit(run, *arguments).result()
        except InfrastructureFailure as failure:
            # A cancelled one has no worker to blame: the cluster is closing, or its scheduler is gone.
            is_loss = not isinstance(failure, DeadlineExceeded) and not isinstance(failure.__cause__, CancelledError)
            if not is_loss or attempt == retries:
                raise
            get_run_logger().warning("%s: %s; it is run again", stage.name, failure)
            sleep(PAUSE_S)
            wait(run.service_id, recovery_s)
    raise AssertionError("unreachable: the last attempt returns or raises")


def tolerate_loss(running: Any) -> None:
    """Wait for a stage that only works ahead. That it lost its worker, or an actor that it called, costs time only: the
    stage behind it does everything. Raises whatever else it raised."""
    try:
        running.result()
    except InfrastructureFailure as failure:
        get_run_logger().warning("%s; the stage behind it does everything itself", failure)
