"""Which engine gets a request: the one that holds the trajectory's prefix, or the freest of its class?

Engines are *current* or, with cross-policy sampling, *stale*. A request that is not for a stale engine never gets one:
evaluation measures the current version. A trajectory may have a prefix on one engine of each kind.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from resources.rollout.engine_link import EngineLink


class Routing:
    """The links to all engines, and who holds which trajectory's prefix."""

    def __init__(
        self, fallback: Mapping[str, Sequence[str]], stale_engines: Collection[str], *, is_deterministic: bool
    ) -> None:
        """
        Args:
            fallback: compatible classes of a class, in order.
            stale_engines: names of those that load only some versions.
            is_deterministic: the choice depends on the trajectory's group and on nothing else.
        """
        self.links: dict[str, list[EngineLink]] = {}
        """By hardware class."""
        self._fallback = {name: tuple(others) for name, others in fallback.items()}
        self._stale_engines = frozenset(stale_engines)
        self._is_deterministic = is_deterministic
        self._homes: dict[str, tuple[EngineLink, ...]] = {}
        """Engines that hold a prefix of each trajectory, the last used one last; at most one of each kind."""

    def __iter__(self) -> Iterator[EngineLink]:
        for of_class in self.links.values():
            yield from of_class

    def is_stale(self, link: EngineLink) -> bool:
        return link.name in self._stale_engines

    def fallback_of(self, hardware_class: str) -> list[str]:
        return list(self._fallback.get(hardware_class, ()))

    def candidates(self, hardware_class: str) -> list[EngineLink]:
        """Current engines of the class and of its fallbacks, usable or not."""
        return [
            link for name in self._names(hardware_class) for link in self.links.get(name, ()) if not self.is_stale(link)
        ]

    def current(self, hardware_class: str, trajectory_id: str, tried: Collection[EngineLink]) -> EngineLink | None:
        """Its own engine; else the freest of its class that has not failed on this request; else of a fallback class;
        else one that has failed on it, but is usable again."""
        home = self._home(trajectory_id, is_stale=False)
        if home is not None and home.usable and home not in tried:
            return home
        usable = [link for link in self.candidates(hardware_class) if link.usable]
        fresh = [link for link in usable if link not in tried]
        for name in self._names(hardware_class):
            of_class = [link for link in fresh if link.hardware_class == name]
            if of_class and self._is_deterministic:
                return _by_group(trajectory_id, of_class)
            if of_class:
                return _freest(of_class)
        return usable[0] if usable else None

    def stale(self, hardware_class: str, trajectory_id: str, tried: Collection[EngineLink]) -> EngineLink | None:
        """Its own stale engine; else the freest of the class that serves it. None: no usable one is left that has not
        failed on this request."""
        home = self._home(trajectory_id, is_stale=True)
        if home is not None and home.usable and home not in tried:
            return home
        names = self._names(hardware_class)
        serving: Sequence[EngineLink] = next((self.links[name] for name in names if self.links.get(name)), ())
        fresh = [link for link in serving if self.is_stale(link) and link.usable and link not in tried]
        return _freest(fresh) if fresh else None

    # -- prefixes ----------------------------------------------------------------------------------------------------

    def settle(self, trajectory_id: str, link: EngineLink) -> None:
        """The trajectory's next request goes here, and its prefix with it."""
        self.leave(trajectory_id, link)
        self._homes[trajectory_id] = (*self._homes.get(trajectory_id, ()), link)

    def leave(self, trajectory_id: str, link: EngineLink) -> None:
        """The prefix on this engine, or on another of its kind, counts no more."""
        homes = self._homes.pop(trajectory_id, ())
        kept = tuple(home for home in homes if self.is_stale(home) is not self.is_stale(link))
        if kept:
            self._homes[trajectory_id] = kept

    def homes(self, trajectory_id: str) -> tuple[EngineLink, ...]:
        """Engines that hold a prefix, the last used one last."""
        return self._homes.get(trajectory_id, ())

    def forget(self, trajectory_id: str) -> None:
        """The trajectory is over: its engines need not keep its KV."""
        for home in self._homes.pop(trajectory_id, ()):
            home.release(trajectory_id)

    def _home(self, trajectory_id: str, *, is_stale: bool) -> EngineLink | None:
        return next((link for link in self.homes(trajectory_id) if self.is_stale(link) is is_stale), None)

    def _names(self, hardware_class: str) -> Iterable[str]:
        return (hardware_class, *self._fallback.get(hardware_class, ()))


def _freest(links: Sequence[EngineLink]) -> EngineLink:
    return max(links, key=lambda link: (link.num_free, -link.num_in_flight))


def _by_group(trajectory_id: str, links: Sequence[EngineLink]) -> EngineLink:
    """An engine that depends on the trajectory's group and on nothing else; siblings share prefixes."""
    group_id = trajectory_id.rsplit("/", 3)[-3]
    return sorted(links, key=lambda link: link.name)[zlib.crc32(group_id.encode()) % len(links)]
