"""Can the cluster run what the configuration asks for? Asked before anything starts, answered within a bounded time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed import Client
from distributed import TimeoutError as DaskTimeoutError

from resources.failures import InfrastructureFailure
from resources.hardware import HardwareClass, PoolsConfig
from resources.pools.fingerprint import Fingerprint, take_fingerprint
from resources.pools.link import scheduler_address
from resources.pools.placement import workers_by_class

logger = logging.getLogger(__name__)

FALLBACK_GRACE_S = 5.0
"""How long a class that is only starting is waited for before its fallback is used."""
POLL_S = 0.1
INSPECTION_S = 20.0
"""Longest wait for a worker to tell which code it runs."""


@dataclass(frozen=True, slots=True)
class ServingClasses:
    """Who serves each hardware class of the configuration."""

    serving: Mapping[str, str]
    """Class by class: itself, or the fallback that stands in for it."""
    workers: Mapping[str, tuple[str, ...]]
    """Addresses of the workers of each serving class."""

    @property
    def num_fallbacks(self) -> int:
        """Classes that a fallback serves; reported with the run's metrics."""
        return sum(wanted != used for wanted, used in self.serving.items())

    def workers_of(self, hardware_class: str) -> tuple[str, ...]:
        """Addresses of the workers that serve a class of the configuration."""
        return self.workers[self.serving[hardware_class]]


def check_pools(client: Client, config: PoolsConfig, *, grace_s: float = FALLBACK_GRACE_S) -> ServingClasses:
    """Wait for workers of every class, map missing classes to their fallbacks, compare code and package versions.

    Args:
        grace_s: seconds before a fallback is used for a class of which the configuration expects workers.

    Raises:
        InfrastructureFailure: a class has neither workers nor a fallback that has, after ``config.start_timeout_s``
            seconds; or a process of the cluster runs other code or other versions.
    """
    serving = _wait_for_classes(client, config, grace_s)
    for wanted, used in serving.serving.items():
        if wanted != used:
            logger.warning("no worker of class %s: class %s stands in for it", wanted, used)
    _compare_code(client, serving)
    return serving


def map_classes(classes: Mapping[str, HardwareClass], present: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Who serves each class, given the classes that have workers, and the classes that nobody serves."""
    serving: dict[str, str] = {}
    missing = []
    for name, hardware_class in classes.items():
        candidates = [each for each in (name, *hardware_class.fallback) if present.get(each)]
        if candidates:
            serving[name] = candidates[0]
        else:
            missing.append(name)
    return serving, missing


def _wait_for_classes(client: Client, config: PoolsConfig, grace_s: float) -> ServingClasses:
    started = time.monotonic()
    while True:
        present = workers_by_class(client)
        serving, missing = map_classes(config.classes, present)
        waited_s = time.monotonic() - started
        stand_ins = [
            wanted for wanted, used in serving.items() if wanted != used and config.classes[wanted].num_workers > 0
        ]
        if not missing and (not stand_ins or waited_s >= grace_s):
            return ServingClasses(serving, {name: tuple(found) for name, found in present.items()})
        if waited_s >= config.start_timeout_s:
            raise InfrastructureFailure(_explain_missing(client, config, missing, present))
        time.sleep(POLL_S)


def _explain_missing(client: Client, config: PoolsConfig, missing: list[str], present: Mapping[str, list[str]]) -> str:
    wanted = "; ".join(f"{name} (fallback: {', '.join(config.classes[name].fallback) or 'none'})" for name in missing)
    there = ", ".join(f"{name} x{len(found)}" for name, found in present.items()) or "none"
    return (
        f"no Dask worker at {scheduler_address(client)} provides hardware class {wanted} after "
        f"{config.start_timeout_s:g} s (pools.start_timeout_s); classes there: {there}. Start a worker with "
        f"--resources '{missing[0]}=1', or name a fallback in pools.classes.{missing[0]}.fallback"
    )


def _compare_code(client: Client, serving: ServingClasses) -> None:
    mine = take_fingerprint()
    addresses = sorted({address for name in set(serving.serving.values()) for address in serving.workers[name]})
    problems = []
    asked = {
        address: client.submit(take_fingerprint, workers=[address], allow_other_workers=False, pure=False)
        for address in addresses
    }
    for address, answer in asked.items():
        problems += _problem(f"worker {address}", mine, lambda answer=answer: answer.result(timeout=INSPECTION_S))
    problems += _problem(
        f"scheduler {scheduler_address(client)}",
        mine,
        lambda: client.sync(client._run_on_scheduler, take_fingerprint, callback_timeout=INSPECTION_S),
    )
    if problems:
        raise InfrastructureFailure(
            "the cluster runs other code than this process: " + "; ".join(problems) + ". Install the same version in "
            "the cluster's environment (pip install -e .) and restart its scheduler and workers"
        )


def _problem(where: str, mine: Fingerprint, ask: Any) -> list[str]:
    try:
        difference = mine.difference(ask())
    except DaskTimeoutError:
        difference = f"no answer within {INSPECTION_S:g} s"
    except ImportError as error:
        difference = f"the rooms are not installed there ({error})"
    return [f"{where}: {difference}"] if difference else []
