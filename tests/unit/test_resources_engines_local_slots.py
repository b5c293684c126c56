"""Slots: which one a request gets, what KV it may start from, and who has to wait."""

from __future__ import annotations

from typing import Literal

import numpy as np

from resources.engines.base import GenerateRequest, SamplingParams
from resources.engines.local_slots import Placement, SlotTable


def request(trajectory_id: str, token_ids: list[int], max_new_tokens: int = 4) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return GenerateRequest(f"r-{trajectory_id}", trajectory_id, np.array(token_ids, dtype=np.int32), sampling, seed=0)


def table(num_slots: int = 2, prefix_cache: Literal["off", "trajectory", "shared"] = "shared") -> SlotTable:
    return SlotTable(num_slots, context_length=64, prefix_cache=prefix_cache)


def play(slots: SlotTable, to_play: GenerateRequest) -> Placement:
    """Place a request, compute its KV, and end it without a sampled token."""
    placement = slots.find_place(to_play)
    assert placement is not None
    slots.occupy(placement, to_play)
    slots.kv_length[placement.slot] = len(to_play.token_ids)
    slots.vacate(placement.slot)
    return placement


def test_a_turn_starts_from_what_its_trajectory_left() -> None:
    slots = table()
    play(slots, request("a", [1, 2, 3]))
    assert slots.find_place(request("a", [1, 2, 3, 4, 5])) == Placement(0, reused=3, shared=3, donor=None)
    # The last token is always computed, and a history that turned out otherwise is reused up to where it differs.
    assert slots.find_place(request("a", [1, 2, 3])) == Placement(0, 2, 2, None)
    assert slots.find_place(request("a", [1, 9, 3, 4])) == Placement(0, 1, 1, None)


def test_the_slot_idle_for_longest_is_evicted() -> None:
    slots = table()
    for name in ("a", "b", "a"):
        play(slots, request(name, [1, 2]))
    assert play(slots, request("c", [3])).slot == 1
    assert slots.slot_of == {"a": 0, "c": 1}
    # A released slot goes first, although it was used last.
    slots.release(1)
    assert play(slots, request("d", [3])).slot == 1


def test_a_request_waits_while_every_slot_or_its_own_runs() -> None:
    slots = table()
    for name in ("a", "b"):
        placement = slots.find_place(request(name, [1, 2]))
        assert placement is not None
        slots.occupy(placement, request(name, [1, 2]))
    assert slots.find_place(request("c", [1])) is None
    slots.vacate(1)
    assert slots.find_place(request("c", [1])) is not None
    assert slots.find_place(request("a", [1, 2, 3])) is None


def test_siblings_wait_for_the_first_and_copy_its_prompt() -> None:
    slots = table(num_slots=3)
    prompt = list(range(30))
    first = slots.find_place(request("a", prompt))
    assert first is not None and first == Placement(0, 0, 0, None)
    slots.occupy(first, request("a", prompt))
    assert slots.find_place(request("b", prompt)) is None
    slots.kv_length[0] = 30
    assert slots.find_place(request("b", prompt)) == Placement(1, reused=0, shared=29, donor=0)
    # Less in common than is worth a copy: computed.
    assert slots.find_place(request("b", [*prompt[:15], 60])) == Placement(1, 0, 0, None)


def test_prefix_cache_settings() -> None:
    for setting, shared in (("off", 0), ("trajectory", 30)):
        slots = table(prefix_cache=setting)  # pyright: ignore[reportArgumentType]
        play(slots, request("a", list(range(30))))
        again = slots.find_place(request("a", list(range(40))))
        assert again is not None and again.shared == shared
        other = slots.find_place(request("b", list(range(40))))
        assert other is not None and other.shared == 0


def test_a_load_leaves_no_kv_and_remembers_what_was_lost() -> None:
    """S23: same prompt before and after a weight change: no token from the old cache, own or shared."""
    slots = table()
    play(slots, request("a", list(range(30))))
    play(slots, request("gone", list(range(40, 60))))
    slots.release(slots.slot_of["gone"])
    assert slots.outdate() == 30
    assert slots.find_place(request("a", list(range(40)))) == Placement(0, 0, 0, None)
    placement = play(slots, request("a", [*range(20), 60]))
    assert slots.outdated[placement.slot] == 20
    assert play(slots, request("b", list(range(30)))).donor == 0


def test_stop_tokens_of_any_number() -> None:
    slots = table()
    for name, stops in (("a", (5, 6, 7)), ("b", ())):
        wanted = GenerateRequest(name, name, np.array([1], np.int32), SamplingParams(stop_token_ids=stops), 0)
        placement = slots.find_place(wanted)
        assert placement is not None
        slots.occupy(placement, wanted)
    assert slots.stops.tolist() == [[5, 6, 7], [-1, -1, -1]]
