"""What becomes of a group when a member of it is scored, fails, or is too old?

| what happens                        | what follows                                                                 |
|-------------------------------------|------------------------------------------------------------------------------|
| enough members are scored           | the group is complete; members that still run are cancelled as redundant     |
| a member fails                      | it is played again, `max_member_retries` times; then it is unscored for good |
| too few members can still be scored | the group failed: issued again, or its prompt is given up                    |
| its oldest token is beyond the bound| the group is stale: cancelled whole, issued again, or its prompt is given up |
| its rewards are equal               | dead: complete all the same, or replaced (``dynamic_sampling``)              |

Part of the gate: pure, decisions are appended to ``out``.
"""

from __future__ import annotations

from collections.abc import Callable

from resources.failures import FailureClass
from resources.rollout.config import RolloutConfig
from resources.rollout.gate_counters import count_cancelled, count_evicted
from resources.rollout.gate_events import Cancel, CancelTermination, Decision, Lost, Start, TooManyLost
from resources.rollout.group_state import FamilyState, Group, Member, MemberState
from resources.rollout.messages import TrajectoryDone


class GroupBook:
    """All groups of a run, by family, and the seats that are waited for."""

    def __init__(
        self,
        run_id: str,
        families: dict[str, FamilyState],
        config: RolloutConfig,
        is_full: Callable[[str], bool],
    ) -> None:
        """
        Args:
            is_full: whether a family has all the groups that may be accepted under the version served now.
        """
        self.families = families
        self.seats: dict[str, tuple[Group, Member]] = {}
        """Trajectories that are waited for: started (running), or awaiting their score."""
        self.cancelled: dict[str, tuple[str, CancelTermination]] = {}
        """Cancelled trajectories whose end was not reported yet, with their family."""
        self.horizon = 0
        """The learner's version of the next batch, as far as known: the version that lags are counted from."""
        self._run_id = run_id
        self._config = config
        self._is_full = is_full
        self._limits: dict[Lost, int | None] = {
            "dead": config.max_replaced_groups,
            "failed": config.max_failed_groups,
            "stale": config.max_stale_groups,
        }

    # -- questions ---------------------------------------------------------------------------------------------------

    def trajectory_id(self, group: Group, member: Member) -> str:
        return f"{self._run_id}/{group.group_id}/{member.index}/{member.attempt}"

    def is_doomed(self, group: Group) -> bool:
        """Whether a group can no longer be trained within the bound."""
        oldest = group.oldest_version
        return oldest is not None and self.horizon - oldest > self._config.lag_bound

    def running(self, trajectory_id: str) -> tuple[Group, Member] | None:
        return self._seat(trajectory_id, MemberState.RUNNING)

    def awaiting(self, trajectory_id: str) -> tuple[Group, Member] | None:
        """The seat of a trajectory whose score is waited for."""
        return self._seat(trajectory_id, MemberState.AWAITING_SCORE)

    def _seat(self, trajectory_id: str, state: MemberState) -> tuple[Group, Member] | None:
        seat = self.seats.get(trajectory_id)
        return seat if seat is not None and seat[1].state is state else None

    # -- members -----------------------------------------------------------------------------------------------------

    def start(self, group: Group, out: list[Decision]) -> None:
        """An admitted group: play every member that was not played yet."""
        family = self.families[group.family]
        family.running[group.group_id] = group
        family.counts["started_groups"] += 1
        for member in group.members:
            if member.state is MemberState.PENDING:
                self._play(group, member, out, is_retry=False)
        self._settle(group, out)

    def _play(self, group: Group, member: Member, out: list[Decision], *, is_retry: bool) -> None:
        trajectory_id = self.trajectory_id(group, member)
        member.state = MemberState.RUNNING
        self.seats[trajectory_id] = (group, member)
        out.append(
            Start(
                trajectory_id, group.family, group.group_id, group.prompt_index, member.index, member.attempt,
                group.group_size, is_retry,
            )
        )  # fmt: skip

    def score(self, group: Group, member: Member, reward: float, success: bool | None, out: list[Decision]) -> None:
        del self.seats[self.trajectory_id(group, member)]
        member.state, member.reward, member.success = MemberState.SCORED, reward, success
        counts = self.families[group.family].counts
        counts["scored"] += 1
        counts["truncated"] += int(member.done is not None and member.done.truncated)
        self._settle(group, out)

    def fail(self, group: Group, member: Member, failure: FailureClass, out: list[Decision]) -> None:
        del self.seats[self.trajectory_id(group, member)]
        family = self.families[group.family]
        family.counts[f"failed.{failure}"] += 1
        member.num_failures += 1
        retry = self._config.member_failure != "fail_fast" and member.num_failures <= self._config.max_member_retries
        if retry:
            family.counts["retried"] += 1
            member.play_again()
            if group.group_id in family.running:
                self._play(group, member, out, is_retry=True)
            return
        member.state = MemberState.FAILED
        member.oldest_version = None
        if self._config.member_failure == "fail_fast":
            self._fail_group(group, out)
        else:
            self._settle(group, out)

    def confirm_cancelled(self, trajectory_id: str, done: TrajectoryDone | None) -> bool:
        """Book the end of a cancelled trajectory (None: it will never report); False if it was not one."""
        known = self.cancelled.pop(trajectory_id, None)
        if known is None:
            return False
        family, termination = known
        count_cancelled(self.families[family].counts, termination, done)
        return True

    # -- groups ------------------------------------------------------------------------------------------------------

    def _settle(self, group: Group, out: list[Decision]) -> None:
        """Accept a group that has what it wants, let one fail that cannot get it any more, leave the others."""
        if group.group_id not in self.families[group.family].running:
            return  # resumed with scores outstanding and not admitted yet: settled when it is
        num_scored, num_alive = group.count(MemberState.SCORED), group.num_alive
        if num_scored >= group.group_size:
            self._accept(group, out)
        elif num_scored + num_alive >= group.group_size:
            return
        elif self._config.member_failure == "minimum_group" and num_scored + num_alive >= self._minimum(group):
            if num_alive == 0:
                self.families[group.family].counts["short_groups"] += 1
                self._accept(group, out)
        else:
            self._fail_group(group, out)

    def _minimum(self, group: Group) -> int:
        return min(self._config.minimum_group, group.group_size)

    def _accept(self, group: Group, out: list[Decision]) -> None:
        family = self.families[group.family]
        self._cancel_members(group, "cancelled_redundant", out)
        del family.running[group.group_id]
        family.note_success(group)
        if not group.has_signal:
            family.counts["dead_groups"] += 1
            if self._config.dynamic_sampling:
                family.counts["replaced_groups"] += 1
                family.num_dropped += 1
                self._count_lost(group.family, "dead", out)
                return
        family.counts["accepted_groups"] += 1
        family.complete.append(group)
        if self._is_full(group.family):
            # What still runs was redundant: the batches that this version may fill are full.
            for redundant in list(family.running.values()):
                self._give_up(redundant, "cancelled_redundant", out)
                family.counts["redundant_groups"] += 1

    def _fail_group(self, group: Group, out: list[Decision]) -> None:
        self.families[group.family].counts["failed_groups"] += 1
        self._count_lost(group.family, "failed", out)
        self._issue_again_or_give_up(group, "preempted", "dropped_failed", out)

    def evict_beyond(self, version: int, out: list[Decision]) -> None:
        """The learner is, or will be, at ``version``: evict what is too old for it."""
        self.horizon = max(self.horizon, version)
        for family in self.families.values():
            for group in [*family.complete, *family.running.values(), *family.waiting]:
                self.evict_if_doomed(group, out)

    def evict_if_doomed(self, group: Group, out: list[Decision]) -> bool:
        if self._config.stale_policy != "evict" or not self.is_doomed(group):
            return False
        self.evict(group, out)
        return True

    def evict(self, group: Group, out: list[Decision]) -> None:
        """Cancel a group whole for what it has sampled; its prompt is issued again, or given up."""
        count_evicted(self.families[group.family].counts, group, self.horizon)
        self._count_lost(group.family, "stale", out)
        self._issue_again_or_give_up(group, "evicted_stale", "dropped_stale", out)

    def _count_lost(self, family_name: str, cause: Lost, out: list[Decision]) -> None:
        lost = self.families[family_name].lost_for_batch
        lost[cause] += 1
        limit = self._limits[cause]
        if limit is not None and lost[cause] > limit:
            out.append(TooManyLost(family_name, cause, lost[cause]))

    def _issue_again_or_give_up(
        self, group: Group, termination: CancelTermination, counter: str, out: list[Decision]
    ) -> None:
        family = self.families[group.family]
        if group.num_reissues >= self._config.max_reissues:
            family.counts[counter] += 1
            self._give_up(group, termination, out)
            return
        self._cancel_members(group, termination, out)
        self._remove(group)
        group.reissue()
        family.counts["reissued_groups"] += 1
        family.waiting.append(group)

    def _give_up(self, group: Group, termination: CancelTermination, out: list[Decision]) -> None:
        self._cancel_members(group, termination, out)
        self._remove(group)
        self.families[group.family].num_dropped += 1

    def _remove(self, group: Group) -> None:
        family = self.families[group.family]
        if family.running.pop(group.group_id, None) is None:
            (family.complete if group in family.complete else family.waiting).remove(group)

    def _cancel_members(self, group: Group, termination: CancelTermination, out: list[Decision]) -> None:
        for member in group.members:
            if not member.state.is_alive:
                continue
            trajectory_id = self.trajectory_id(group, member)
            if self.seats.pop(trajectory_id, None) is not None:
                if member.state is MemberState.RUNNING:
                    self.cancelled[trajectory_id] = (group.family, termination)
                    out.append(Cancel(trajectory_id, termination))
                else:  # played already: only its score is not waited for any more
                    count_cancelled(self.families[group.family].counts, termination, member.done)
            member.state = MemberState.CANCELLED
