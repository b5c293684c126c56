"""What does a resumed run go on from? The state of the gate as JSON, and back.

Scored, unconsumed groups and scored members are kept; what was being played is issued again under a new attempt number;
a batch that was taken but whose update is not part of the version resumed from goes back to the head of the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from resources.rollout.curriculum import SuccessRecord
from resources.rollout.group_state import (
    ATTEMPTS_OF_A_LIFE,
    FamilyState,
    Group,
    MemberState,
    group_as_json,
    group_from_json,
)

if TYPE_CHECKING:
    from resources.rollout.staleness import StalenessGate

FORMAT = 2


def snapshot(gate: StalenessGate) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": gate.version,
        "next_batch": gate.next_batch,
        "shares": gate.shares.snapshot(),
        "families": {name: _family_as_json(family) for name, family in gate.families.items()},
    }


def _family_as_json(family: FamilyState) -> dict[str, Any]:
    return {
        "cursor": family.cursor,
        "num_trained": family.num_trained,
        "num_dropped": family.num_dropped,
        "lost_for_batch": dict(family.lost_for_batch),
        "counts": dict(family.counts),
        "success": family.success.as_json(),
        "prompts": family.prompts.snapshot(),
        "in_training": [group_as_json(group) for group in family.in_training],
        "complete": [group_as_json(group) for group in family.complete],
        "open": [group_as_json(group) for group in family.open_groups()],
    }


def restore(gate: StalenessGate, state: Mapping[str, Any], version: int | None) -> None:
    """Bring a new gate to the state of a snapshot, at policy ``version`` (default: the snapshot's own).

    Without ``families`` in the state (nothing but a version is known), the cursors stand at the prompts trained.
    ``life`` in the state says how often the run was resumed: ids of trajectories that a killed driver started after
    the snapshot never return, so that no row or score of theirs is taken for a new one's.

    Raises ValueError for a state of another format, or with families that the configuration lacks.
    """
    assert not gate.is_open and not gate.seats, "restore comes before the first event"
    gate.admission.version = gate.book.horizon = version if version is not None else int(state["version"])
    gate.first_attempt = ATTEMPTS_OF_A_LIFE * int(state.get("life", 0))
    stored_families = state.get("families", {})
    if stored_families and state.get("format") != FORMAT:
        raise ValueError(
            f"the saved state of the group queue has format {state.get('format')}, this version reads {FORMAT}; resume "
            "with the version of rollart that the run was started with"
        )
    unknown = set(stored_families) - set(gate.families)
    if unknown:
        raise ValueError(f"the saved run has the families {sorted(unknown)}, which this configuration lacks")
    taken_back = bool(stored_families) and int(state["next_batch"]) > gate.version
    for name, family in gate.families.items():
        stored = stored_families.get(name)
        if stored is None:
            family.cursor = family.num_trained = gate.version * family.config.groups_per_iteration
            family.prompts.pass_over(family.cursor)
            continue
        _restore_family(family, stored, taken_back)
        for group in (*family.complete, *family.waiting):
            _enter_life(gate, group)
    if stored_families:
        in_training = {name: len(stored["in_training"]) for name, stored in stored_families.items()}
        gate.shares.restore(state["shares"], gate.version, in_training)
    else:
        gate.shares.pass_by(gate.version)
    gate.counted_at_last_batch = {name: dict(family.counts) for name, family in gate.families.items()}


def _restore_family(family: FamilyState, stored: Mapping[str, Any], taken_back: bool) -> None:
    family.cursor = stored["cursor"]
    family.num_trained, family.num_dropped = stored["num_trained"], stored["num_dropped"]
    family.lost_for_batch.update(stored["lost_for_batch"])
    family.counts.update(stored["counts"])
    family.success = SuccessRecord(*stored["success"])
    family.prompts.restore(stored["prompts"])
    taken = [group_from_json(record) for record in stored["in_training"]]
    if taken_back:
        family.complete.extend(taken)
    else:
        family.num_trained += len(taken)
    family.complete.extend(group_from_json(record) for record in stored["complete"])
    family.waiting.extend(group_from_json(record) for record in stored["open"])


def _enter_life(gate: StalenessGate, group: Group) -> None:
    for member in group.members:
        member.enter_life(gate.first_attempt)
        if member.state is MemberState.AWAITING_SCORE:
            gate.seats[gate.trajectory_id(group, member)] = (group, member)
