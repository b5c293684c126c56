"""What a published policy version consists of: its files with their checksums, its tensors with shapes and types."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from resources.failures import InfrastructureFailure

TENSOR_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
"""PEFT's name for it."""
MANIFEST_FILE = "manifest.json"
HASH_BLOCK_BYTES = 2**20


class WeightsDamaged(InfrastructureFailure):
    """A file of a published version is not the one that its manifest names."""


class TensorEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: tuple[int, ...]
    dtype: str
    """As torch prints it, e.g. ``bfloat16``."""


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: int
    sha256: str


class AdapterEntry(BaseModel):
    """What a version that is an adapter alone stands beside: its policy is W + ``scaling`` B A of the base's W."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_digest: str
    """Of the base's weights (`resources.policy.directory.weights_digest`)."""
    base: str = "base"
    """Folder of the base, beside the versions'."""
    scaling: float


class WeightManifest(BaseModel):
    """Written after every file that it names, before ``latest`` points at it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = 1
    run_id: str
    version: int
    base: int | None
    """Version that this one was trained from, where the publisher says so."""
    published_at: float
    """Unix seconds."""
    tensors: dict[str, TensorEntry]
    """By name, as they lie in the tensors' file."""
    tied: dict[str, str]
    """Names that are left out because they are another tensor: a tied head -> the embedding."""
    files: dict[str, FileEntry]
    """By file name: ``model.safetensors``, ``config.json``, the tokenizer's files; of an adapter, PEFT's two."""
    adapter: AdapterEntry | None = None
    """Of a version that is an adapter alone; None: the version is the whole policy."""

    @property
    def tensor_file(self) -> str:
        """Name of the tensors' file."""
        return TENSOR_FILE if self.adapter is None else ADAPTER_FILE

    @property
    def num_bytes(self) -> int:
        """Of the tensors' file."""
        return self.files[self.tensor_file].num_bytes

    def same_weights(self, other: WeightManifest) -> bool:
        """Whether both hold the same tensors and files, whenever and from whatever base they were published."""
        ours, theirs = ((each.tensors, each.tied, each.files, each.adapter) for each in (self, other))
        return ours == theirs


def file_entry(path: Path) -> FileEntry:
    """Size and checksum of a local file."""
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
            num_bytes += len(block)
    return FileEntry(num_bytes=num_bytes, sha256=digest.hexdigest())


def bytes_entry(data: bytes) -> FileEntry:
    """Size and checksum of what a file is to hold."""
    return FileEntry(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def check_file(path: Path, expected: FileEntry) -> None:
    """Raises WeightsDamaged when the file is absent or another one than the manifest names."""
    try:
        found = file_entry(path)
    except FileNotFoundError:
        raise WeightsDamaged(f"{path} is missing, though its manifest names it; publish the version again") from None
    if found != expected:
        raise WeightsDamaged(
            f"{path} has {found.num_bytes} bytes and sha256 {found.sha256[:16]}…, its manifest says "
            f"{expected.num_bytes} and {expected.sha256[:16]}…; publish the version again"
        )
