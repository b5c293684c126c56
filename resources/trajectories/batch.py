"""Batch manifests: what each version was trained on, written once under ``runs/<run>/batches/<version>.json``."""

from __future__ import annotations

import dataclasses
from typing import Any

from resources.failures import InfrastructureFailure
from resources.object_store import ObjectStore, encode_json
from resources.rollout.messages import Batch, BatchGroup, BatchMember
from resources.trajectories.trajectory import TrajectoryRef


class BatchConflict(InfrastructureFailure):
    """A batch of this run and version is already written, and it is another one: it may have been trained."""


def batch_key(run_id: str, version: int) -> str:
    """Key of the manifest of batch ``version``, under the root of the store."""
    return f"runs/{run_id}/batches/{version:06d}.json"


def write_batch(store: ObjectStore, batch: Batch) -> str:
    """Write the manifest unless it is there; returns its key. Writing an equal batch again changes nothing.

    ``counters`` come back as JSON has them (keys are strings, tuples are lists). Raises BatchConflict when the version
    has another batch, ValueError when ``counters`` is not JSON.
    """
    key = batch_key(batch.run_id, batch.version)
    document = dataclasses.asdict(batch)
    try:
        data = encode_json(document)
    except (TypeError, ValueError) as error:
        raise ValueError(f"batch {batch.version} of run {batch.run_id!r}: {error}; counters must be JSON") from error
    if not store.create(key, data):
        written = store.get(key)
        if written != data:
            raise BatchConflict(
                f"batch {batch.version} of run {batch.run_id!r} is already written to {store.uri(key)} and differs: "
                f"{_difference(store.get_json(key), document)}; read that one, or start a new run"
            )
    return key


def read_batch(store: ObjectStore, run_id: str, version: int) -> Batch:
    """The batch that version ``version + 1`` is trained on. Raises KeyError when there is no manifest."""
    document = store.get_json(batch_key(run_id, version))
    return Batch(
        run_id=document["run_id"],
        version=document["version"],
        groups=tuple(_group(group) for group in document["groups"]),
        counters=document["counters"],
    )


def batch_versions(store: ObjectStore, run_id: str) -> list[int]:
    """Versions that have a manifest, ascending."""
    keys = store.list(f"runs/{run_id}/batches")
    return sorted(int(key.rsplit("/", 1)[-1].removesuffix(".json")) for key in keys)


def _group(document: dict[str, Any]) -> BatchGroup:
    members = tuple(BatchMember(**(row | {"ref": TrajectoryRef(**row["ref"])})) for row in document["members"])
    return BatchGroup(**(document | {"members": members}))


def _difference(written: dict[str, Any], wanted: dict[str, Any]) -> str:
    if [g["group_id"] for g in written["groups"]] != [g["group_id"] for g in wanted["groups"]]:
        groups = [{group["group_id"] for group in document["groups"]} for document in (written, wanted)]
        return f"groups {sorted(groups[0] - groups[1])[:5]} there, {sorted(groups[1] - groups[0])[:5]} here"
    for before, after in zip(written["groups"], wanted["groups"], strict=True):
        if encode_json(before) != encode_json(after):
            return f"members of group {before['group_id']!r}"
    return "counters"
