"""Which slot does a request get, and how much KV does it find there? Bookkeeping only: no model, no thread, no clock.

A slot holds one history and as much of its KV as is computed. KV is always of the version that is loaded: a load sets
every slot's KV to nothing, and what a history needs again is computed when it next generates.

Shapes: S slots, M context length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from resources.engines.base import GenerateRequest

SMALLEST_SHARED_PREFIX = 16
"""Tokens. Copying less from another history than this costs more than computing it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes: ``reused`` tokens are there already; with a donor, KV ``reused .. shared`` is copied."""

    slot: int
    reused: int
    shared: int
    donor: int | None


@dataclass(slots=True)
class SlotTable:
    num_slots: int
    context_length: int
    prefix_cache: Literal["off", "trajectory", "shared"]
    history: np.ndarray = field(init=False)
    """int32 [S, M]: given and sampled tokens."""
    logprobs: np.ndarray = field(init=False)
    """float32 [S, M], where sampled by the running request."""
    versions: np.ndarray = field(init=False)
    """int32 [S, M], where sampled by the running request."""
    length: np.ndarray = field(init=False)
    """Tokens of the history."""
    kv_length: np.ndarray = field(init=False)
    """Tokens whose KV is in the cache, of the loaded version."""
    outdated: np.ndarray = field(init=False)
    """Tokens whose KV was lost to a load: computing one of them again is recomputation."""
    active: np.ndarray = field(init=False)
    """A request runs in the slot."""
    prompt_length: np.ndarray = field(init=False)
    limit: np.ndarray = field(init=False)
    """Length at which the running request ends."""
    seed: np.ndarray = field(init=False)
    temperature: np.ndarray = field(init=False)
    greedy: np.ndarray = field(init=False)
    stops: np.ndarray = field(init=False)
    """int32 [S, most stop tokens of a request so far], padded with -1."""
    arrival: np.ndarray = field(init=False)
    """Order of admission of the running requests."""
    last_used: np.ndarray = field(init=False)
    owner: list[str | None] = field(init=False)
    """Trajectory whose history the slot keeps."""
    slot_of: dict[str, int] = field(init=False)
    _clock: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        slots, context = self.num_slots, self.context_length
        self.history = np.zeros((slots, context), dtype=np.int32)
        self.logprobs = np.zeros((slots, context), dtype=np.float32)
        self.versions = np.zeros((slots, context), dtype=np.int32)
        for name in ("length", "kv_length", "outdated", "prompt_length", "limit", "arrival", "last_used"):
            setattr(self, name, np.zeros(slots, dtype=np.int64))
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.temperature = np.ones(slots, dtype=np.float64)
        self.active = np.zeros(slots, dtype=bool)
        self.greedy = np.zeros(slots, dtype=bool)
        self.stops = np.full((slots, 1), -1, dtype=np.int32)
        self.owner = [None] * slots
        self.slot_of = {}

    def find_place(self, request: GenerateRequest) -> Placement | None:
        """Decide; nothing changes yet. None: wait, because every slot is busy, because the trajectory's own request
        still runs, or because a request that runs is about to compute the same beginning."""
        own = self.slot_of.get(request.trajectory_id)
        slot = self._free_slot() if own is None else own
        if slot is None or self.active[slot]:
            return None
        # The last token is always computed: its logits are what is sampled from.
        most = len(request.token_ids) - 1
        if self.prefix_cache == "off":
            return Placement(slot, 0, 0, None)
        reused = min(self._common_prefix(slot, request.token_ids), int(self.kv_length[slot]), most)
        if self.prefix_cache == "trajectory" or most - reused < SMALLEST_SHARED_PREFIX:
            return Placement(slot, reused, reused, None)
        common = np.minimum(self._common_prefixes(request.token_ids), most)
        available = np.minimum(common, self.kv_length)
        donor = int(available.argmax())
        shared = int(available[donor])
        if shared < reused + SMALLEST_SHARED_PREFIX:
            donor, shared = None, reused
        promised = np.where(self.active, np.minimum(common, self.prompt_length), 0)
        if promised.max() >= shared + SMALLEST_SHARED_PREFIX:
            return None
        return Placement(slot, reused, shared, donor)

    def occupy(self, placement: Placement, request: GenerateRequest) -> None:
        """Start a request in its slot, whose KV is that of its first ``placement.shared`` tokens."""
        slot, token_ids, sampling = placement.slot, request.token_ids, request.sampling
        assert not self.active[slot], (slot, self.owner[slot])
        if self.owner[slot] == request.trajectory_id:
            self.outdated[slot] = min(int(self.outdated[slot]), self._common_prefix(slot, token_ids))
        else:
            self.release(slot)
            self.owner[slot] = request.trajectory_id
            self.slot_of[request.trajectory_id] = slot
            self.outdated[slot] = 0
        num_tokens = len(token_ids)
        self.history[slot, :num_tokens] = token_ids
        self.length[slot] = self.prompt_length[slot] = num_tokens
        self.kv_length[slot] = placement.shared
        self.limit[slot] = min(num_tokens + sampling.max_new_tokens, self.context_length)
        self.seed[slot] = request.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature[slot] = sampling.temperature
        self.greedy[slot] = sampling.greedy
        self._set_stops(slot, sampling.stop_token_ids)
        self.active[slot] = True
        self._clock += 1
        self.arrival[slot] = self._clock

    def vacate(self, slot: int) -> None:
        """The slot's request ended; the history stays for the trajectory's next turn."""
        assert self.active[slot], slot
        self.active[slot] = False
        self._clock += 1
        self.last_used[slot] = self._clock
        if self.prefix_cache == "off":
            self.release(slot)

    def release(self, slot: int) -> None:
        """The slot belongs to nobody any more. Its KV stays readable for other histories until it is overwritten."""
        owner = self.owner[slot]
        if owner is not None:
            del self.slot_of[owner]
            self.owner[slot] = None

    def outdate(self) -> int:
        """The version moved: no KV is valid any more. Returns the number of tokens that histories in use have lost."""
        used = np.array([owner is not None for owner in self.owner])
        lost = int(self.kv_length[used].sum())
        np.maximum(self.outdated, self.kv_length, out=self.outdated)
        self.kv_length[:] = 0
        return lost

    def _free_slot(self) -> int | None:
        """A slot that nobody owns, the lowest first (close slots are read in one go), else the one idle for longest."""
        owned = np.array([owner is not None for owner in self.owner])
        rank = np.where(self.active, np.iinfo(np.int64).max, np.where(owned, 1 + self.last_used, 0))
        slot = int(rank.argmin())
        return None if self.active[slot] else slot

    def _common_prefix(self, slot: int, token_ids: np.ndarray) -> int:
        most = min(len(token_ids), int(self.length[slot]))
        differs = self.history[slot, :most] != token_ids[:most]
        return int(differs.argmax()) if differs.any() else most

    def _common_prefixes(self, token_ids: np.ndarray) -> np.ndarray:
        """int64 [S]: tokens that each slot's history has in common with ``token_ids``."""
        differs = self.history[:, : len(token_ids)] != token_ids
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), len(token_ids))
        return np.minimum(first, self.length)

    def _set_stops(self, slot: int, stop_token_ids: tuple[int, ...]) -> None:
        missing = len(stop_token_ids) - self.stops.shape[1]
        if missing > 0:
            padding = np.full((self.num_slots, missing), -1, dtype=np.int32)
            self.stops = np.concatenate([self.stops, padding], axis=1)
        self.stops[slot] = -1
        self.stops[slot, : len(stop_token_ids)] = stop_token_ids
