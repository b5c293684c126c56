"""What does a wait wait for? Names families, groups, members and stages, for the message of a deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from resources.rollout.dispatch import Dispatcher
from resources.rollout.evaluation_lane import Evaluation
from resources.rollout.group_state import Group, MemberState
from resources.rollout.staleness import StalenessGate

NUM_NAMED_MEMBERS = 4
NUM_NAMED_GROUPS = 3


def describe_missing_batch(
    gate: StalenessGate,
    dispatcher: Dispatcher,
    last_failures: Mapping[str, str],
    score_wait: Callable[[str], str],
) -> str:
    """One line: for each family that lacks groups, the groups nearest to completion, what their trajectories wait for
    (on which worker, for how long), and what went wrong last.

    Args:
        last_failures: by family.
        score_wait: what a trajectory that awaits its score waits for.
    """
    parts = []
    for name, number in gate.missing().items():
        family = gate.families[name]
        wanted = gate.shares.wanted(name)
        nearest = sorted(family.running.values(), key=lambda group: group.num_alive)[:NUM_NAMED_GROUPS]
        text = f"{name} lacks {number} of {wanted} groups"
        if not nearest:
            text += f" and runs none ({len(family.waiting)} wait for admission)"
        text += "".join(f"; {_describe_group(gate, dispatcher, group, score_wait)}" for group in nearest)
        failed = sum(count for key, count in family.counts.items() if key.startswith("failed."))
        if failed:
            text += f"; {failed} members have failed so far"
        if name in last_failures:
            text += f", the last one: {last_failures[name]}"
        if dispatcher.breaker(name).describe(name):
            text += f"; {dispatcher.breaker(name).describe(name)}"
        parts.append(text)
    return " | ".join(parts) or "nothing: every family has its groups"


def _describe_group(gate: StalenessGate, dispatcher: Dispatcher, group: Group, score_wait: Callable[[str], str]) -> str:
    alive = [member for member in group.members if member.state.is_alive]
    named = []
    for member in alive[:NUM_NAMED_MEMBERS]:
        trajectory_id = gate.trajectory_id(group, member)
        awaits = member.state is MemberState.AWAITING_SCORE
        stage = score_wait(trajectory_id) if awaits else dispatcher.stage_of(trajectory_id)
        named.append(f"{trajectory_id} {stage}")
    more = f", and {len(alive) - len(named)} more" if len(alive) > len(named) else ""
    return f"{group.group_id}: {', '.join(named)}{more}"


def describe_missing_episodes(
    evaluation: Evaluation,
    dispatcher: Dispatcher,
    last_failures: Mapping[str, str],
    score_wait: Callable[[str], str],
) -> str:
    """One line: the first episodes that are missing, what they wait for, and what went wrong last in each family."""
    missing = evaluation.missing()
    named = []
    for episode in missing[:NUM_NAMED_MEMBERS]:
        trajectory_id = evaluation.id_of(episode)
        stage = score_wait(trajectory_id) if episode.awaits_score else dispatcher.stage_of(trajectory_id)
        named.append(f"{trajectory_id} {stage}")
    failures = [f"last failure of {name}: {message}" for name, message in last_failures.items()]
    text = f"{len(missing)} of {len(evaluation.episodes)} episodes are missing: "
    return text + "; ".join([*named, *failures])
