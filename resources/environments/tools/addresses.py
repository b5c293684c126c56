"""Which of several servers does an episode go to? Each in turn, and on to the next one when it does not take it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

_lock = threading.Lock()
_counters: dict[tuple[str, ...], itertools.count[int]] = {}
"""One for each list of addresses in this process: runs that share servers share the turn, too."""


def check_addresses(addresses: Sequence[str], schemes: Sequence[str]) -> tuple[str, ...]:
    """The addresses without a slash at their end. Raises ValueError naming the one that is wrong."""
    if isinstance(addresses, str) or not addresses:
        raise ValueError(
            f"addresses is {addresses!r}; it must be a list of at least one, such as {schemes[0]}://host:8000"
        )
    for address in addresses:
        try:
            parts = urlsplit(str(address))
            usable = parts.scheme in schemes and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(f"addresses holds {address!r}; an address is {' or '.join(schemes)}://host:port")
    return tuple(str(address).rstrip("/") for address in addresses)


def in_turn(addresses: tuple[str, ...]) -> list[str]:
    """All addresses, beginning with the one whose turn it is."""
    with _lock:
        start = next(_counters.setdefault(addresses, itertools.count())) % len(addresses)
    return [*addresses[start:], *addresses[:start]]
