"""Does another process run the same code as this one?"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("flows", "tasks", "resources")
WIRE_PACKAGES = ("cloudpickle", "dask", "distributed", "prefect", "pyarrow")
"""Packages whose objects travel between processes. Others may differ: an engine's environment has its own torch."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must agree between the driver, the scheduler and every worker."""

    code_digest: str
    """First 12 hex digits of the SHA-256 of all Python sources of the rooms."""
    code_folder: str
    versions: tuple[tuple[str, str], ...]
    """Python and `WIRE_PACKAGES`."""

    def difference(self, other: Fingerprint) -> str:
        """What differs from ``other``, in words; empty when nothing does."""
        parts = []
        if self.code_digest != other.code_digest:
            parts.append(
                f"code {other.code_digest} in {other.code_folder} instead of {self.code_digest} in {self.code_folder}"
            )
        mine, theirs = dict(self.versions), dict(other.versions)
        parts += [
            f"{package} {theirs.get(package, 'missing')} instead of {version}"
            for package, version in mine.items()
            if theirs.get(package) != version
        ]
        return ", ".join(parts)


def take_fingerprint() -> Fingerprint:
    """The fingerprint of the files on this process's disk, in some milliseconds."""
    digest = hashlib.sha256()
    folders = []
    for room in ROOMS:
        spec = importlib.util.find_spec(room)
        locations = list(spec.submodule_search_locations or ()) if spec is not None else []
        for location in locations:
            folders.append(str(Path(location).parent))
            _add_sources(digest, room, Path(location))
    versions = (("python", ".".join(platform.python_version_tuple()[:2])), *((p, _version(p)) for p in WIRE_PACKAGES))
    return Fingerprint(digest.hexdigest()[:12], ", ".join(dict.fromkeys(folders)), versions)


def _add_sources(digest: hashlib._Hash, room: str, folder: Path) -> None:
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{room}/{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(path.read_bytes())
        digest.update(b"\0")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
