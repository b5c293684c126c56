"""A local copy of a version that lies in a remote store: downloaded once a machine, verified, dropped when pruned."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from resources.object_store import TEMPORARY_PREFIX, ObjectStore
from resources.weights.manifest import FileEntry, WeightsDamaged, check_file

COPY_BYTES = 2**23


def default_cache() -> Path:
    """Folder for local copies: ``ROLLART_WEIGHT_CACHE``, else one of this user in the temporary folder."""
    return Path(
        os.environ.get("ROLLART_WEIGHT_CACHE") or Path(tempfile.gettempdir()) / f"rollart-weights-{os.getuid()}"
    )


def cached_version(cache: Path, remote: ObjectStore, folder: str, files: Mapping[str, FileEntry]) -> Path:
    """The local directory of a version (or of the base), with every file that its manifest names, checksums verified.

    ``remote`` is the folder of all versions, ``folder`` this one's key in it. Raises WeightsDamaged when what came
    is not what the manifest names.
    """
    run_cache = cache / hashlib.sha256(remote.url.encode()).hexdigest()[:16]
    target = run_cache / folder
    if target.is_dir():
        try:
            return _verified(target, files)
        except WeightsDamaged:
            shutil.rmtree(target, ignore_errors=True)  # a version that was replaced, or a damaged copy: fetch it anew
    download = run_cache / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    download.mkdir(parents=True)
    try:
        file_system, base = remote.arrow()
        for name in files:
            with (
                file_system.open_input_stream(f"{base}/{folder}/{name}", buffer_size=COPY_BYTES) as source,
                (download / name).open("wb") as copy,
            ):
                shutil.copyfileobj(source, copy, COPY_BYTES)
        _verified(download, files)
        try:
            download.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            _verified(target, files)  # another process of this machine was first
    finally:
        shutil.rmtree(download, ignore_errors=True)
    return target


def drop_absent(cache: Path, remote: ObjectStore, folders: set[str]) -> None:
    """Remove local copies of versions that are not in the store any more. Files in use stay readable until closed."""
    run_cache = cache / hashlib.sha256(remote.url.encode()).hexdigest()[:16]
    if run_cache.is_dir():
        for entry in run_cache.iterdir():
            if entry.name not in folders and not entry.name.startswith(TEMPORARY_PREFIX):
                shutil.rmtree(entry, ignore_errors=True)


def _verified(directory: Path, files: Mapping[str, FileEntry]) -> Path:
    for name, entry in files.items():
        check_file(directory / name, entry)
    return directory
