"""How a replica learns the scorer arguments of a run's task families: one small object that the run writes once.

A replica that finds none makes scorers without arguments. It cannot judge by a wrong rule unseen: the version in every
request names the arguments that it was asked for (`resources.rewards.scorers.registry`), and another one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resources.environments.family import FamilyConfig
from resources.object_store import ObjectStore


def write_scorer_arguments(store: ObjectStore, run_id: str, families: Mapping[str, FamilyConfig]) -> None:
    """Before the first replica is launched. ``store`` is the root store."""
    arguments = {name: family.scorer_arguments for name, family in families.items()}
    store.put_json(_key(run_id), arguments)


def read_scorer_arguments(store: ObjectStore, run_id: str) -> dict[str, dict[str, Any]]:
    """By task family; empty when the run has written none."""
    try:
        return store.get_json(_key(run_id))
    except KeyError:
        return {}


def _key(run_id: str) -> str:
    return f"runs/{run_id}/rewards/scorer_arguments.json"
