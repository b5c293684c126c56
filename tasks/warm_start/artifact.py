"""Where a warm-started policy lies: a Hugging Face directory in the store, complete once its manifest is there."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from resources.object_store import ObjectStore

MANIFEST = "manifest.json"


def warm_start_key(digest: str) -> str:
    """Folder of a warm start under the root of the store."""
    return f"warm_starts/{digest}"


def publish_warm_start(store: ObjectStore, digest: str, directory: Path, report: dict[str, Any]) -> None:
    """Copy a model directory into the store; the manifest, with sizes, hashes and the report, moves last."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        store.put(f"{warm_start_key(digest)}/{path.name}", data)
        files[path.name] = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    store.put_json(f"{warm_start_key(digest)}/{MANIFEST}", {"digest": digest, "files": files, "report": report})


def find_warm_start(store: ObjectStore, digest: str) -> dict[str, Any] | None:
    """The manifest of a complete warm start, or None."""
    try:
        return store.get_json(f"{warm_start_key(digest)}/{MANIFEST}")
    except KeyError:
        return None


def warm_start_directory(store: ObjectStore, digest: str, download_to: Path) -> Path:
    """A local model directory with it: the store's own on file://, otherwise downloaded below ``download_to``.

    Raises:
        KeyError: there is no complete warm start of that digest.
        ValueError: a file does not match the manifest.
    """
    manifest = store.get_json(f"{warm_start_key(digest)}/{MANIFEST}")
    own = store.local_path(warm_start_key(digest))
    directory = own or download_to / digest
    directory.mkdir(parents=True, exist_ok=True)
    for name, expected in manifest["files"].items():
        data = store.get(f"{warm_start_key(digest)}/{name}")
        if hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise ValueError(
                f"{store.uri(warm_start_key(digest))}/{name} does not match its manifest; delete that folder, and the "
                "warm start is trained again"
            )
        if own is None:
            (directory / name).write_bytes(data)
    return directory
