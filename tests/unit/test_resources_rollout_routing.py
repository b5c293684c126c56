"""Which engine a request goes to, and what is remembered of the prefixes that lie on engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from resources.rollout.engine_link import EngineLink
from resources.rollout.routing import Routing

OWN, OTHER = "run/maze/0-1/0", "run/maze/0-1/1"


@dataclass(eq=False)
class StandingLink:
    """What routing reads of a link to an engine."""

    name: str
    usable: bool = True
    num_free: int = 4
    num_in_flight: int = 0
    hardware_class: str = "compute"
    released: list[str] = field(default_factory=list)

    def release(self, trajectory_id: str) -> None:
        self.released.append(trajectory_id)


def routing_of(*links: StandingLink, stale: tuple[str, ...] = ()) -> Routing:
    routing = Routing({}, stale, is_deterministic=False)
    for link in links:
        routing.links.setdefault(link.hardware_class, []).append(cast(Any, link))
    return routing


def as_link(link: StandingLink) -> EngineLink:
    return cast(Any, link)


def test_a_trajectory_keeps_one_prefix_of_each_kind_of_engine() -> None:
    first, second, old = StandingLink("first"), StandingLink("second"), StandingLink("old")
    routing = routing_of(first, second, old, stale=("old",))
    for link in (first, old, second):
        routing.settle(OWN, as_link(link))
    assert [home.name for home in routing.homes(OWN)] == ["old", "second"], "the last used one last"
    routing.leave(OWN, as_link(first))
    assert [home.name for home in routing.homes(OWN)] == ["old"], "another engine of the kind it left"
    routing.leave(OWN, as_link(old))
    assert routing.homes(OWN) == ()


def test_what_one_trajectory_leaves_another_keeps() -> None:
    first = StandingLink("first")
    routing = routing_of(first)
    routing.settle(OWN, as_link(first))
    routing.settle(OTHER, as_link(first))
    routing.forget(OWN)
    assert first.released == [OWN] and routing.homes(OTHER) == (as_link(first),)


def test_a_stale_turn_goes_to_its_own_stale_engine_while_that_one_serves() -> None:
    fresh, old, older = StandingLink("fresh"), StandingLink("old", num_free=1), StandingLink("older", num_free=9)
    routing = routing_of(fresh, old, older, stale=("old", "older"))
    assert routing.stale("compute", OWN, ()) is as_link(older), "the freest"
    routing.settle(OWN, as_link(old))
    assert routing.stale("compute", OWN, ()) is as_link(old), "its prefix lies there"
    assert routing.stale("compute", OWN, (as_link(old),)) is as_link(older), "it has failed on this request"
    old.usable = False
    assert routing.stale("compute", OWN, ()) is as_link(older), "it cannot take requests now"
    older.usable = False
    assert routing.stale("compute", OWN, ()) is None, "a current engine is none for it"
    assert routing.current("compute", OWN, ()) is as_link(fresh)


def test_a_current_turn_goes_to_its_own_engine_while_that_one_serves() -> None:
    first, second = StandingLink("first", num_free=1), StandingLink("second", num_free=9)
    routing = routing_of(first, second)
    routing.settle(OWN, as_link(first))
    assert routing.current("compute", OWN, ()) is as_link(first)
    assert routing.current("compute", OWN, (as_link(first),)) is as_link(second)
    first.usable = False
    assert routing.current("compute", OWN, ()) is as_link(second)
    assert routing.current("compute", OWN, (as_link(second),)) is as_link(second), "failed on it, but usable again"
