"""Who is reading which version: a lease keeps the cleaner away until it is given back or has run out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from resources.object_store import ObjectStore

LEASE_S = 1800.0


class ReaderLeases:
    """Leases lie in ``leases/<version>/`` of the weights' folder; a reader that died holds its version for LEASE_S."""

    def __init__(
        self, folder: ObjectStore, *, lease_s: float = LEASE_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._lease_s = lease_s
        self._clock = clock

    @contextmanager
    def held(self, version: int, reader: str = "") -> Iterator[None]:
        """Keep ``version`` from being pruned while the block runs (at most ``lease_s``)."""
        key = f"{_folder(version)}/{uuid.uuid4().hex}.json"
        self._folder.put_json(key, {"reader": reader, "expires_at": self._clock() + self._lease_s})
        try:
            yield
        finally:
            self._folder.delete(key)

    def is_held(self, version: int) -> bool:
        """Whether a lease on the version is alive. Leases that have run out are removed."""
        alive = False
        for key in self._folder.list(_folder(version)):
            try:
                expires_at = self._folder.get_json(key)["expires_at"]
            except KeyError:
                continue  # given back since it was listed
            if expires_at > self._clock():
                alive = True
            else:
                self._folder.delete(key)
        return alive


def _folder(version: int) -> str:
    return f"leases/v{version:06d}"
