"""The weight store: every published policy version as one directory, and a pointer to the newest that moves last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from resources.failures import InfrastructureFailure
from resources.object_store import ObjectStore, checked_key
from resources.weights.adapter import MergedTensors
from resources.weights.base import BASE_FOLDER, HeldBase, expect_base, hold_base, publish_base
from resources.weights.download import cached_version, default_cache, drop_absent
from resources.weights.leases import ReaderLeases
from resources.weights.manifest import (
    ADAPTER_FILE,
    MANIFEST_FILE,
    TENSOR_FILE,
    AdapterEntry,
    FileEntry,
    TensorEntry,
    WeightManifest,
    bytes_entry,
    check_file,
    file_entry,
)
from resources.weights.ties import expected_tensors, split_ties

if TYPE_CHECKING:
    import torch

LATEST = "latest.json"


class WeightConflict(InfrastructureFailure):
    """This version is already published, with other weights."""


class WeightStore:
    """Versions of one run, under ``runs/<run_id>/weights/``. One publisher; any number of readers, in any process.

    ``v000012/`` holds ``model.safetensors``, the files of the model and ``manifest.json``, which is written after them:
    a version without one does not exist for readers. A version that is an adapter alone holds PEFT's two files instead,
    and ``base/`` the model that it stands beside. Methods block; call them from a thread in async code.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        *,
        cache: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``store`` is the root that holds all runs. ``cache`` keeps local copies when it is remote."""
        self._folder = store.sub(f"runs/{run_id}/weights")
        self._run_id = run_id
        self._cache = cache or default_cache()
        self._clock = clock
        self._leases = ReaderLeases(self._folder, clock=clock)
        self._held: HeldBase | None = None

    def publish_base(self, directory: str | Path, digest: str) -> str:
        """Keep the model that versions are adapters of, once a run; returns where it lies. Before the first of them.

        Raises ValueError when it is not the model of this digest, or when the run's adapters stand beside another one.
        """
        publish_base(self._folder, self._run_id, directory, digest)
        local = self._folder.local_path(BASE_FOLDER)
        return self._folder.uri(BASE_FOLDER) if local is None else str(local)

    def publish(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        files: Mapping[str, bytes] | None = None,
        base: int | None = None,
        adapter: AdapterEntry | None = None,
        on_exist: Literal["verify", "replace"] = "verify",
    ) -> WeightManifest:
        """Write a version, then its manifest, then ``latest`` (which never moves back).

        ``tensors`` have their Hugging Face names. ``files`` are written beside them: with ``config.json`` and the
        tokenizer's files, the version's directory loads with ``AutoModelForCausalLM.from_pretrained``. A tied head is
        left out and recorded (`split_ties`). With ``adapter`` the tensors are those of an adapter by PEFT's names, and
        ``files`` its configuration. A version that is already there must hold the same weights, else
        WeightConflict; with ``on_exist="replace"`` (a resume that trains the version again, before anybody reads it)
        it is written anew. Raises ValueError for malformed names, and for an untied head that is missing.
        """
        if version < 0:
            raise ValueError(f"version is {version}; allowed are 0 and above")
        if not tensors:
            raise ValueError(f"version {version} of run {self._run_id!r} has no tensors; publish the whole model")
        files = files or {}
        tensor_file = TENSOR_FILE if adapter is None else ADAPTER_FILE
        for name in files:
            if name in (tensor_file, MANIFEST_FILE) or "/" in checked_key(name):
                raise ValueError(
                    f"files: {name!r} is not allowed; give plain names other than {tensor_file}, {MANIFEST_FILE}"
                )
        stored, tied = split_ties(tensors, files.get("config.json"))
        staged = self._folder.staging(f"{_directory(version)}/{tensor_file}")
        try:
            _save(stored, staged)
            manifest = WeightManifest(
                run_id=self._run_id,
                version=version,
                base=base,
                published_at=self._clock(),
                tensors={name: _entry(tensor) for name, tensor in sorted(stored.items())},
                tied=tied,
                files={tensor_file: file_entry(staged), **{name: bytes_entry(data) for name, data in files.items()}},
                adapter=adapter,
            )
            if self._folder.exists(_manifest(version)):
                published = self.manifest(version)
                if published.same_weights(manifest):
                    self._move_latest(version)
                    return published
                if on_exist == "verify":
                    raise WeightConflict(
                        f"version {version} of run {self._run_id!r} is already published with other weights or files "
                        f"({self._folder.uri(_directory(version))}); publish the next version, or replace this one"
                    )
                self._folder.delete(_manifest(version))
                for name in published.files.keys() - manifest.files.keys():
                    self._folder.delete(f"{_directory(version)}/{name}")
            self._folder.adopt(f"{_directory(version)}/{tensor_file}", staged)
        finally:
            staged.unlink(missing_ok=True)
        for name, data in files.items():
            self._folder.put(f"{_directory(version)}/{name}", data)
        self._folder.put(_manifest(version), manifest.model_dump_json().encode())
        self._move_latest(version)
        return manifest

    def latest(self) -> int | None:
        """Newest published version; None before the first."""
        try:
            return int(self._folder.get_json(LATEST)["version"])
        except KeyError:
            return None

    def versions(self) -> list[int]:
        """Published versions that have not been pruned, ascending."""
        keys = [key for key in self._folder.list() if key.endswith(f"/{MANIFEST_FILE}")]
        return sorted(int(key[1:].partition("/")[0]) for key in keys if key.startswith("v"))

    def manifest(self, version: int) -> WeightManifest:
        """Raises KeyError naming the versions there are when this one is not published (or pruned)."""
        try:
            data = self._folder.get(_manifest(version))
        except KeyError:
            raise KeyError(
                f"version {version} of run {self._run_id!r} is not in {self._folder.url}; it holds {self.versions()}"
            ) from None
        return WeightManifest.model_validate_json(data)

    def fetch(self, version: int, names_expected: set[str] | None = None) -> Mapping[str, torch.Tensor]:
        """The policy's tensors in a version by name, on the CPU, checksum verified; mapped from the file where it is
        local. An adapter is merged into its base as its matrices are read (`MergedTensors`).

        ``names_expected`` are the names the reader will load: exactly these come back, a tied head as the tensor it is
        tied to. Raises ValueError naming what is missing and what is unmatched (S24), KeyError for a version that is
        not published, WeightsDamaged when a file is not what the manifest names, or the base not the adapter's.
        """
        from safetensors.torch import load_file

        with self.reading(version, "fetch"):
            manifest = self.manifest(version)
            tensors: Mapping[str, torch.Tensor] = load_file(self._local_directory(manifest) / manifest.tensor_file)
        tied = manifest.tied
        if manifest.adapter is not None:
            base = self._base(manifest, manifest.adapter)
            tensors = MergedTensors(base.tensors, tensors, manifest.adapter.scaling, self._named(version))
            tied = base.tied
        return (
            tensors if names_expected is None else expected_tensors(tensors, tied, names_expected, self._named(version))
        )

    def num_bytes(self, version: int) -> int:
        """Of a version's tensors as published: what travels to a reader that has the base, if it needs one."""
        return self.manifest(version).num_bytes

    def policy_directory(self, version: int) -> Path:
        """A local directory with ``config.json`` and the tokenizer's files of a version: its own, or its base's.

        Raises as `fetch`.
        """
        with self.reading(version, "policy_directory"):
            manifest = self.manifest(version)
            if manifest.adapter is not None:
                return self._base(manifest, manifest.adapter).directory
            return self._local_directory(manifest)

    def directory(self, version: int) -> Path:
        """A local directory of the version, checksums verified: the store's own, or a copy when the store is remote.

        It may be pruned once `reading` is over, like the version itself.
        """
        with self.reading(version, "directory"):
            return self._local_directory(self.manifest(version))

    def reading(self, version: int, reader: str = "") -> AbstractContextManager[None]:
        """A lease for a long read: while the block runs, `prune` leaves the version alone (S8)."""
        return self._leases.held(version, reader)

    def prune(self, keep: int, protected: set[int]) -> list[int]:
        """Remove all but the newest ``keep`` versions; returns those removed.

        Never removed: ``protected`` versions, the latest, and what a live lease holds (a later call finds them).
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; allowed are 1 and above, or the engines have nothing to load")
        latest = self.latest()
        if latest is None:
            return []
        keys = self._folder.list()
        present = {int(key[1:].partition("/")[0]) for key in keys if key.startswith("v")}
        spared = {latest, *protected, *self.versions()[-keep:]}
        removed = []
        # A version above the latest is being published; one below it without a manifest is what a killed prune left.
        for version in sorted(v for v in present - spared if v < latest):
            if self._remove(version, [key for key in keys if key.startswith(f"{_directory(version)}/")]):
                removed.append(version)
        return removed

    def _remove(self, version: int, keys: list[str]) -> bool:
        if self._leases.is_held(version):
            return False
        manifest_key = _manifest(version)
        data = self._folder.get(manifest_key) if manifest_key in keys else None
        # Readers take their lease before they look for the manifest, this looks for leases after it has hidden the
        # manifest: one of the two always sees the other.
        self._folder.delete(manifest_key)
        if self._leases.is_held(version):
            if data is not None:
                self._folder.put(manifest_key, data)
            return False
        for key in keys:
            self._folder.delete(key)
        local = self._folder.local_path(_directory(version))
        if local is not None and local.is_dir() and not any(local.iterdir()):
            local.rmdir()
        return True

    def _local_directory(self, manifest: WeightManifest) -> Path:
        return self._local_files(_directory(manifest.version), manifest.files)

    def _local_files(self, folder: str, files: Mapping[str, FileEntry]) -> Path:
        local = self._folder.local_path(folder)
        if local is None:
            kept = {BASE_FOLDER, *(_directory(version) for version in self.versions())}
            drop_absent(self._cache, self._folder, kept)
            return cached_version(self._cache, self._folder, folder, files)
        for name, entry in files.items():
            check_file(local / name, entry)
        return local

    def _base(self, manifest: WeightManifest, adapter: AdapterEntry) -> HeldBase:
        if self._held is None or self._held.digest != adapter.base_digest:
            found = expect_base(self._folder, adapter.base_digest, self._named(manifest.version))
            self._held = hold_base(self._local_files(BASE_FOLDER, found.files), found.digest)
        return self._held

    def _named(self, version: int) -> str:
        return f"version {version} of run {self._run_id!r}"

    def _move_latest(self, version: int) -> None:
        latest = self.latest()
        if latest is None or version > latest:
            self._folder.put_json(LATEST, {"version": version})


def _directory(version: int) -> str:
    return f"v{version:06d}"


def _manifest(version: int) -> str:
    return f"{_directory(version)}/{MANIFEST_FILE}"


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(ready, path, metadata={"format": "pt"})


def _entry(tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
