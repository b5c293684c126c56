"""The invariants of the staleness gate, each a named assert with the objects in question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resources.rollout.group_state import FamilyState, Group, MemberState

if TYPE_CHECKING:
    from resources.rollout.staleness import StalenessGate


def check_invariants(gate: StalenessGate) -> None:
    """Raise AssertionError on the first one that is broken."""
    _shares(gate)
    for name, family in gate.families.items():
        _admission(gate, name, family)
        _every_group_in_one_place(name, family)
        for group in family.running.values():
            _running_group(gate, group)
        for group in family.complete:
            _complete_group(gate, group)
        for group in family.waiting:
            _waiting_group(gate, group)
    _seats(gate)


def _admission(gate: StalenessGate, name: str, family: FamilyState) -> None:
    num_running = len(family.running)
    budget, accepted = gate.admission.budget(name), gate.admission.accepted(name)
    ceiling = budget + family.config.redundant_groups
    assert num_running <= family.config.max_concurrent_groups, ("concurrency", name, num_running)
    assert accepted + num_running <= max(ceiling, accepted), ("admission", name, accepted, num_running, ceiling)
    assert accepted <= budget, ("accepted within the budget", name, accepted)
    if gate.is_open and accepted < budget:
        admissible = gate.admission.admissible(name)
        assert admissible <= 0, ("work is never held back", name, admissible)


def _shares(gate: StalenessGate) -> None:
    shares = gate.shares
    for name, share in shares.families.items():
        assert share.points[-1] == share.owed, ("what is owed is what was owed after the last batch", name, share)
        if gate.config.curriculum is not None:
            continue  # quotas that move may put a family ahead by more than the slack of its new quota
        window, slack = gate.config.share_window, shares.slack(name)
        assert abs(share.owed) <= slack, ("owed within the slack", name, share, slack)
        points = list(share.points)
        if window is not None and len(points) > window:
            drift = points[-1] - points[-1 - window]
            assert abs(drift) <= slack, ("trained shares over a window", name, points, slack)
        if window is not None and len(points) >= window:
            assert not all(points[-window:]), ("what was missed is made good within the window", name, points)
    if gate.config.curriculum is None:
        owed = {name: share.owed for name, share in shares.families.items()}
        assert sum(owed.values()) == 0, ("what one family misses, others have had", owed)


def _every_group_in_one_place(name: str, family: FamilyState) -> None:
    groups = [*family.in_training, *family.complete, *family.running.values(), *family.waiting]
    ids = [group.group_id for group in groups]
    assert len(set(ids)) == len(ids), ("a group is in two places", name, ids)
    assert all(group.number < family.cursor for group in groups), ("a group was never issued", name, ids)
    placed = len(groups) + family.num_trained + family.num_dropped
    assert placed == family.cursor, ("a group was lost or counted twice", name, placed, family.cursor)


def _running_group(gate: StalenessGate, group: Group) -> None:
    num_scored, num_alive = group.count(MemberState.SCORED), group.num_alive
    assert num_alive > 0, ("a running group waits for nobody", group)
    assert num_scored < group.group_size, ("a running group has all it wants", group)
    assert not group.count(MemberState.PENDING), ("a running group has members nobody started", group)
    assert not group.count(MemberState.CANCELLED), ("a running group has cancelled members", group)
    _within_bounds(gate, group)


def _complete_group(gate: StalenessGate, group: Group) -> None:
    num_scored = group.count(MemberState.SCORED)
    assert group.num_alive == 0, ("a complete group still runs", group)
    if num_scored != group.group_size:
        assert gate.config.member_failure == "minimum_group", ("a short group", group)
        assert num_scored >= min(gate.config.minimum_group, group.group_size), ("a group below the minimum", group)
    for member in group.members:
        if member.state is MemberState.SCORED:
            assert member.reward is not None and member.done is not None and member.done.ref is not None, member
    _within_bounds(gate, group)


def _waiting_group(gate: StalenessGate, group: Group) -> None:
    assert not group.count(MemberState.RUNNING), ("a waiting group runs", group)
    _within_bounds(gate, group)


def _within_bounds(gate: StalenessGate, group: Group) -> None:
    config = gate.config
    if config.stale_policy == "evict":
        assert not gate.book.is_doomed(group), ("a group beyond the staleness bound", gate.horizon, group)
    assert group.num_reissues <= config.max_reissues, ("re-issued too often", group)
    retries = 0 if config.member_failure == "fail_fast" else config.max_member_retries
    for member in group.members:
        assert member.num_failures <= retries + 1, ("retried too often", member)


def _seats(gate: StalenessGate) -> None:
    expected = {}
    for family in gate.families.values():
        for group in family.open_groups():
            for member in group.members:
                if member.state in (MemberState.RUNNING, MemberState.AWAITING_SCORE):
                    expected[gate.trajectory_id(group, member)] = (group.group_id, member.index)
    actual = {key: (group.group_id, member.index) for key, (group, member) in gate.seats.items()}
    assert actual == expected, ("seats do not match the groups", actual.keys() ^ expected.keys())
    both = gate.seats.keys() & gate.book.cancelled.keys()
    assert not both, ("a trajectory is both awaited and cancelled", both)
