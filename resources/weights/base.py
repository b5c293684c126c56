"""The model beside which a run's adapters were trained: kept once a run beside its versions, never pruned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, ConfigDict

from resources.object_store import ObjectStore
from resources.policy.directory import INDEX_FILE, digest_of_hashes, policy_files, weight_files
from resources.weights.manifest import (
    MANIFEST_FILE,
    TENSOR_FILE,
    FileEntry,
    WeightsDamaged,
    bytes_entry,
    file_entry,
)
from resources.weights.ties import EMBEDDING, HEAD, ties_head

if TYPE_CHECKING:
    import torch

BASE_FOLDER = "base"
"""In the folder of a run's versions."""
COMPUTED_BUFFER = ".rotary_emb.inv_freq"
"""Older files hold it; no model reads it."""


class BaseManifest(BaseModel):
    """Written after every file that it names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = 1
    run_id: str
    source: str
    """Directory that the files were copied from."""
    files: dict[str, FileEntry]
    """By file name: all of the model's."""

    @property
    def digest(self) -> str:
        """Of the weights, as `resources.policy.directory.weights_digest` makes it."""
        return digest_of_hashes({n: entry.sha256 for n, entry in self.files.items() if n.endswith(".safetensors")})


def publish_base(folder: ObjectStore, run_id: str, directory: str | Path, digest: str) -> None:
    """Copy a model directory to ``base/`` unless it lies there. ``folder`` is that of the run's versions.

    Raises ValueError when another base lies there, or when ``directory`` is not the model of this digest any more.
    """
    directory = Path(directory).absolute()
    found = find_base(folder)
    if found is not None:
        if found.digest != digest:
            raise ValueError(
                f"the versions of run {run_id!r} are adapters of the base {found.digest[:16]}… (from {found.source}), "
                f"and training starts from {digest[:16]}… ({directory}); start from the same policy.model_directory, "
                "or start a new run"
            )
        return
    entries: dict[str, FileEntry] = {}
    for path in weight_files(directory):
        key = f"{BASE_FOLDER}/{path.name}"
        staged = folder.staging(key)
        try:
            shutil.copyfile(path, staged)
            entries[path.name] = file_entry(staged)
            folder.adopt(key, staged)
        finally:
            staged.unlink(missing_ok=True)
    small = policy_files(directory)
    if (directory / INDEX_FILE).is_file():
        small[INDEX_FILE] = (directory / INDEX_FILE).read_bytes()
    for name, data in small.items():
        folder.put(f"{BASE_FOLDER}/{name}", data)
        entries[name] = bytes_entry(data)
    manifest = BaseManifest(run_id=run_id, source=str(directory), files=entries)
    if manifest.digest != digest:
        raise ValueError(
            f"the weights in {directory} are {manifest.digest[:16]}…, and were {digest[:16]}… when training started; "
            "keep policy.model_directory as it is while a run trains an adapter of it"
        )
    folder.put(f"{BASE_FOLDER}/{MANIFEST_FILE}", manifest.model_dump_json().encode())


def find_base(folder: ObjectStore) -> BaseManifest | None:
    """The manifest of the base beside a run's versions; None when there is none."""
    try:
        return BaseManifest.model_validate_json(folder.get(f"{BASE_FOLDER}/{MANIFEST_FILE}"))
    except KeyError:
        return None


def expect_base(folder: ObjectStore, digest: str, what: str) -> BaseManifest:
    """The manifest of the base with this digest. Raises WeightsDamaged, about ``what``, for none or another one."""
    found = find_base(folder)
    if found is None:
        raise WeightsDamaged(
            f"{what} is an adapter of the base {digest[:16]}…, and {folder.uri(BASE_FOLDER)} holds none; put the "
            "base back, or publish merged versions (training.lora.publish)"
        )
    if found.digest != digest:
        raise WeightsDamaged(
            f"{what} is an adapter of the base {digest[:16]}…, and the base in {folder.uri(BASE_FOLDER)} is "
            f"{found.digest[:16]}… (from {found.source}), beside which it means nothing; put its own back"
        )
    return found


class HeldBase(NamedTuple):
    """A base that was verified, once, and stays mapped: versions beside it are merged without reading it anew."""

    digest: str
    directory: Path
    tensors: Mapping[str, torch.Tensor]
    """By name."""
    tied: dict[str, str]
    """Name left out -> name it equals."""


def hold_base(directory: Path, digest: str) -> HeldBase:
    """Map the tensors of a model directory whose files were verified."""
    from safetensors.torch import load_file

    index = directory / INDEX_FILE
    names = sorted(set(json.loads(index.read_bytes())["weight_map"].values())) if index.is_file() else [TENSOR_FILE]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors.update(load_file(directory / name))
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(COMPUTED_BUFFER)}
    if ties_head((directory / "config.json").read_bytes()):
        # Where the head is tied a file may hold it all the same: no model reads it.
        kept.pop(HEAD, None)
        return HeldBase(digest, directory, kept, {HEAD: EMBEDDING})
    return HeldBase(digest, directory, kept, {})
