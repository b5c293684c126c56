"""Where the data plane keeps its files: whole objects under keys, on a file system or in an S3 bucket
(`resources.s3_object_store`)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow.fs

TEMPORARY_PREFIX = ".tmp-"
"""File names that begin so are objects being written: never listed, and skipped by pyarrow.dataset."""


class ObjectStore(ABC):
    """Objects under '/'-joined relative keys. An object is visible whole or not at all, whichever back end holds it.

    Pickles as its url, so it may travel to any process. Methods block: call them from a thread in async code. A store
    that cannot be reached raises OSError. What survives is the death of a process, not of the machine (no fsync).
    """

    url: str
    """``file:///absolute/path`` or ``s3://bucket/prefix``, without a slash at the end."""

    @classmethod
    def open(cls, url: str | os.PathLike[str]) -> ObjectStore:
        """The store at ``url``: ``file:///path``, ``s3://bucket/prefix`` or a plain path (made absolute).

        Nothing is read or written (`check_writable` does). Raises ValueError for any other scheme.
        """
        text = os.fspath(url)
        scheme, separator, rest = text.partition("://")
        if not separator:
            if not text:
                raise ValueError("store: '' is not allowed: give a path, file:///path or s3://bucket/prefix")
            return LocalObjectStore(os.path.abspath(os.path.expanduser(text)))
        if scheme == "file":
            if not rest.startswith("/"):
                raise ValueError(f"store: {text!r} must name an absolute path: file:///path, with three slashes")
            return LocalObjectStore(os.path.abspath(rest))
        if scheme == "s3":
            bucket, _, prefix = rest.partition("/")
            if not bucket:
                raise ValueError(f"store: {text!r} names no bucket: s3://bucket/prefix")
            from resources.s3_object_store import S3ObjectStore  # here: it is an ObjectStore itself

            return S3ObjectStore(bucket, prefix.strip("/"))
        raise ValueError(f"store: scheme {scheme!r} in {text!r}; allowed: file:///path, s3://bucket/prefix or a path")

    def check_writable(self) -> None:
        """Create and delete one small object. Raises ValueError naming the url, the cause and the remedy."""
        key = f"writable-{uuid.uuid4().hex}"
        try:
            self.create(key, b"")
            self.delete(key)
        except OSError as error:
            raise ValueError(f"store: {self.url!r} cannot be written ({error}); {self._remedy}") from error

    @abstractmethod
    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write or replace an object, atomically: readers see the old one or the new one."""

    @abstractmethod
    def create(self, key: str, data: bytes | memoryview) -> bool:
        """Write an object unless its key is taken, atomically against every other writer; False when it is taken."""

    @abstractmethod
    def adopt(self, key: str, source: Path) -> None:
        """Like `put`, for a local file that this call takes away (renamed on the same file system, else uploaded)."""

    @abstractmethod
    def staging(self, key: str) -> Path:
        """A fresh local path, its folder made, to write a large file at before `adopt`; nobody else sees it."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The object's bytes. Raises KeyError when there is none."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes. Raises KeyError when there is none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; no-op when there is none."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Sorted keys under the folder ``prefix``, at any depth; [] when there are none.

        Whole path segments count, with or without a slash at the end: ``a`` lists ``a/x`` and not ``ab/x``.
        """

    @abstractmethod
    def arrow(self) -> tuple[pyarrow.fs.FileSystem, str]:
        """pyarrow's file system for this store and the base path in it: an object lies at ``base + '/' + key``."""

    @abstractmethod
    def local_path(self, key: str) -> Path | None:
        """The object's path on file://, whether it exists or not; None on s3://."""

    @property
    @abstractmethod
    def _remedy(self) -> str: ...

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except KeyError:
            return False
        return True

    def put_json(self, key: str, value: Any) -> None:
        self.put(key, encode_json(value))

    def get_json(self, key: str) -> Any:
        """Raises KeyError when there is no such object, ValueError when it is not JSON."""
        return json.loads(self.get(key))

    def uri(self, key: str) -> str:
        """Full url of a key, as it is written here (nothing is percent-encoded)."""
        return f"{self.url}/{checked_key(key)}"

    def sub(self, prefix: str) -> ObjectStore:
        """The same store, seen from a folder of it."""
        return ObjectStore.open(self.uri(prefix))

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore.open, (self.url,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectStore) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"ObjectStore.open({self.url!r})"


class LocalObjectStore(ObjectStore):
    """A folder. Objects are written beside their final name and renamed (`put`) or hard-linked (`create`) to it."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.url = f"file://{self.root}".rstrip("/")

    def put(self, key: str, data: bytes | memoryview) -> None:
        path = self.local_path(key)
        temporary = self._write_beside(path, data)
        try:
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def create(self, key: str, data: bytes | memoryview) -> bool:
        path = self.local_path(key)
        temporary = self._write_beside(path, data)
        try:
            os.link(temporary, path)  # fails when the name is taken; O_EXCL would show a half-written object
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def adopt(self, key: str, source: Path) -> None:
        path = self.local_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.replace(source, path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            temporary = temporary_beside(path)
            shutil.copyfile(source, temporary)
            os.replace(temporary, path)
            source.unlink()

    def staging(self, key: str) -> Path:
        path = self.local_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        return temporary_beside(path)

    def get(self, key: str) -> bytes:
        try:
            return self.local_path(key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise KeyError(self.uri(key)) from None

    def size(self, key: str) -> int:
        path = self.local_path(key)
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(self.uri(key)) from None
        if path.is_dir():
            raise KeyError(self.uri(key))
        return status.st_size

    def delete(self, key: str) -> None:
        self.local_path(key).unlink(missing_ok=True)

    def list(self, prefix: str = "") -> list[str]:
        prefix = prefix.rstrip("/")
        folder = self.local_path(prefix) if prefix else self.root
        return sorted(_walk(str(folder), f"{prefix}/" if prefix else ""))

    def arrow(self) -> tuple[pyarrow.fs.FileSystem, str]:
        import pyarrow.fs

        return pyarrow.fs.LocalFileSystem(use_mmap=True), str(self.root)

    def local_path(self, key: str) -> Path:
        return self.root / checked_key(key)

    @property
    def _remedy(self) -> str:
        return "choose a folder that this user may write, on a file system with hard links"

    def _write_beside(self, path: Path, data: bytes | memoryview) -> Path:
        temporary = temporary_beside(path)
        try:
            file = temporary.open("wb", buffering=0)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = temporary.open("wb", buffering=0)
        try:
            with file:
                view = memoryview(data).cast("B")
                while view:
                    view = view[file.write(view) :]
        except BaseException:  # an interrupt, too, leaves nothing behind
            temporary.unlink(missing_ok=True)
            raise
        return temporary


def encode_json(value: Any) -> bytes:
    """Canonical JSON (sorted keys, no NaN), so that equal values are equal objects."""
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def checked_key(key: str) -> str:
    """The key itself. ValueError unless it is '/'-joined, relative, and free of '.', '..' and temporary names."""
    segments = key.split("/")
    if any(not s or s in (".", "..") or s.startswith(TEMPORARY_PREFIX) or "\\" in s or "\0" in s for s in segments):
        raise ValueError(
            f"object key {key!r}: give non-empty segments joined by '/', none of them '.', '..' or {TEMPORARY_PREFIX}*"
        )
    return key


def temporary_beside(path: Path) -> Path:
    """A name in the same folder for an object that is being written."""
    return path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")


def _walk(folder: str, key_prefix: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir():
            yield from _walk(entry.path, f"{key_prefix}{entry.name}/")
        elif not entry.name.startswith(TEMPORARY_PREFIX):
            yield f"{key_prefix}{entry.name}"
