"""Where does a rollout worker find the tokenizer? Beside the weights of the run's newest version, or of their base."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from resources.failures import InfrastructureFailure
from resources.object_store import ObjectStore
from resources.weights.base import BASE_FOLDER

_FOLDER = re.compile(r"(v\d+|base)/(.+)")


def fetch_policy_files(store: ObjectStore, run_id: str) -> Path:
    """A local directory with the configuration and tokenizer files of the newest published version (no weights).

    On a local store it is the version's own directory, or that of the base where versions are adapters; otherwise its
    small files are copied to a temporary one. Raises InfrastructureFailure when no version was published with its
    files.
    """
    prefix = f"runs/{run_id}/weights"
    files: dict[str, list[str]] = {}
    for key in store.list(prefix):
        match = _FOLDER.fullmatch(key.removeprefix(f"{prefix}/"))
        if match:
            files.setdefault(match[1], []).append(key)
    complete = [
        folder
        for folder, keys in files.items()
        if {"manifest.json", "config.json", "tokenizer_config.json"} <= {key.rsplit("/", 1)[1] for key in keys}
    ]
    if not complete:
        raise InfrastructureFailure(
            f"{store.uri(prefix)} holds no version with config.json and tokenizer_config.json; publish one before the "
            "rollout workers start, or give them a policy_directory"
        )
    keys = files[max(complete, key=lambda folder: int(folder[1:]) if folder != BASE_FOLDER else -1)]
    local = store.local_path(keys[0])
    if local is not None:
        return local.parent
    directory = Path(tempfile.mkdtemp(prefix="rollart-policy-"))
    for key in keys:
        if not key.endswith(".safetensors"):
            (directory / key.rsplit("/", 1)[1]).write_bytes(store.get(key))
    return directory


def read_context_length(directory: Path) -> int:
    """Tokens that the policy was built for. Raises ValueError naming the file when it does not say."""
    path = directory / "config.json"
    value = json.loads(path.read_bytes()).get("max_position_embeddings")
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{path} has max_position_embeddings {value!r}; it must be a positive integer")
    return value
