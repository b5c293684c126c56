"""Did two runs do the same? Digests of what was played, trained and published, without where and when.

Left out, because two runs of one configuration may differ in it: ids of runs and attempts, the file and row a
trajectory lies in, engines, workers, and everything measured in seconds or found in a cache.
"""

from __future__ import annotations

import hashlib
from typing import Any

from resources.object_store import ObjectStore, encode_json
from resources.rollout.messages import Batch
from resources.trajectories.batch import batch_versions, read_batch
from resources.trajectories.store import read_trajectories
from resources.trajectories.trajectory import Trajectory
from resources.weights.store import WeightStore

_SCALARS = (
    "family", "env_id", "env_version", "group_id", "member", "group_size", "seed_env", "seed_sampling", "split",
    "temperature", "top_p", "top_k", "tokenizer_hash", "template_hash", "prompt_length", "reward", "reward_components",
    "success", "termination", "truncated", "failure_class", "scorer", "scorer_version", "messages", "final_state",
    "sequence_starts",
)  # fmt: skip
_OF_A_TURN = (
    "observation_start", "action_start", "action_end", "hardware_class", "finish_reason", "reward", "tool_name",
    "invalid_action",
)  # fmt: skip
_ARRAYS = ("token_ids", "loss_mask", "behaviour_logprobs", "token_versions")


def trajectory_digest(trajectory: Trajectory) -> str:
    """Hexadecimal SHA-256 of a trajectory's content: tokens, bits of the log-probabilities, versions, rewards, text."""
    facts: dict[str, Any] = {name: getattr(trajectory, name) for name in _SCALARS}
    facts["turns"] = [[getattr(turn, name) for name in _OF_A_TURN] for turn in trajectory.turns]
    digest = hashlib.sha256(encode_json(facts))
    for name in _ARRAYS:
        array = getattr(trajectory, name)
        digest.update(f"{name}:{array.dtype.str}:{len(array)};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def batch_digest(store: ObjectStore, batch: Batch) -> str:
    """Of a batch: its groups and members in order, each with its final reward and its trajectory's digest."""
    members = [member for group in batch.groups for member in group.members]
    played = iter(read_trajectories(store, [member.ref for member in members]))
    facts = [
        [group.group_id, group.family, group.seed_env]
        + [[m.reward, m.success, m.scorer, m.scorer_version, trajectory_digest(next(played))] for m in group.members]
        for group in batch.groups
    ]
    return hashlib.sha256(encode_json({"version": batch.version, "groups": facts})).hexdigest()


def run_digests(store: ObjectStore, run_id: str) -> dict[str, dict[int, str]]:
    """``batches`` and ``weights`` of a run by version; two runs that did the same have equal ones."""
    weights = WeightStore(store, run_id)
    return {
        "batches": {v: batch_digest(store, read_batch(store, run_id, v)) for v in batch_versions(store, run_id)},
        "weights": {m.version: m.files[m.tensor_file].sha256 for m in map(weights.manifest, weights.versions())},
    }
