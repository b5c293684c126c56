"""How does an S3 bucket hold the objects of a store?"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resources.object_store import ObjectStore, checked_key, temporary_beside

if TYPE_CHECKING:
    import pyarrow.fs

CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
CONFLICT_RETRIES = 5


class S3ObjectStore(ObjectStore):
    """A prefix of a bucket, through s3fs. The endpoint is AWS_ENDPOINT_URL (path-style) when set, credentials are the
    usual AWS variables or files. `create` is a conditional write (If-None-Match), which the service must support."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket = bucket
        self.base = f"{bucket}/{prefix}" if prefix else bucket
        self.url = f"s3://{self.base}"

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._os_errors():
            self._fs.pipe_file(self._path(key), bytes(data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        for attempt in range(CONFLICT_RETRIES):
            try:
                with self._os_errors():
                    self._fs.pipe_file(self._path(key), bytes(data), mode="create")
                return True
            except FileExistsError:
                return False
            except OSError as error:
                # Two conditional writes of one key at once: the service may ask the loser to come again.
                if "ConditionalRequestConflict" not in repr(error.__cause__) or attempt == CONFLICT_RETRIES - 1:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def adopt(self, key: str, source: Path) -> None:
        with self._os_errors():
            self._fs.put_file(str(source), self._path(key))
        source.unlink()

    def staging(self, key: str) -> Path:
        checked_key(key)
        folder = Path(tempfile.gettempdir()) / "rollart-staging"
        folder.mkdir(parents=True, exist_ok=True)
        return temporary_beside(folder / key.rsplit("/", 1)[-1])

    def get(self, key: str) -> bytes:
        try:
            with self._os_errors():
                return self._fs.cat_file(self._path(key))
        except FileNotFoundError:
            raise KeyError(self.uri(key)) from None

    def size(self, key: str) -> int:
        try:
            with self._os_errors():
                info = self._fs.info(self._path(key))
        except FileNotFoundError:
            raise KeyError(self.uri(key)) from None
        if info["type"] != "file":
            raise KeyError(self.uri(key))
        return int(info["size"])

    def delete(self, key: str) -> None:
        with self._os_errors():
            self._fs.rm_file(self._path(key))

    def list(self, prefix: str = "") -> list[str]:
        folder = self._path(prefix.rstrip("/")) if prefix else self.base
        with self._os_errors():
            paths = self._fs.find(folder)
        return sorted(path[len(self.base) + 1 :] for path in paths if path.startswith(f"{folder}/"))

    def arrow(self) -> tuple[pyarrow.fs.FileSystem, str]:
        import pyarrow.fs

        options: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT_S, "request_timeout": READ_TIMEOUT_S}
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region:
            options["region"] = region
        endpoint = os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            options["scheme"], _, options["endpoint_override"] = endpoint.rstrip("/").partition("://")
        return pyarrow.fs.S3FileSystem(**options), self.base

    def local_path(self, key: str) -> Path | None:
        checked_key(key)
        return None

    @property
    def _remedy(self) -> str:
        return "check that the bucket exists, AWS_ENDPOINT_URL (if any) and the AWS credentials"

    @property
    def _fs(self) -> Any:
        import s3fs  # here: it takes half a second, and most stores are folders

        endpoint = os.environ.get("AWS_ENDPOINT_URL")
        config: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S}
        if endpoint:
            config["s3"] = {"addressing_style": "path"}
        # fsspec keeps one instance per process and options; a cached listing would hide what other processes write.
        return s3fs.S3FileSystem(endpoint_url=endpoint, config_kwargs=config, use_listings_cache=False)

    def _path(self, key: str) -> str:
        return f"{self.base}/{checked_key(key)}"

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError

        try:
            yield
        except BotoCoreError as error:  # s3fs translates what the service answers, not what keeps it from answering
            raise OSError(f"{self.url}: {error}") from error
