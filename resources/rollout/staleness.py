"""The staleness gate: which groups may start, which may be trained. A pure state machine: events in, decisions out.

Admission per family f, in groups (the rule of AReaL, arXiv 2505.24298, section 5.1, here per family)::

    start_f <= min(max_concurrent_f - running_f,
                   (max_staleness + version + 1) * groups_f + redundant_f - accepted_f - running_f)

where the number of batches, ``max_staleness + version + 1``, never exceeds those that the run will take.
A group is reserved whole and runs until it is scored. ``accepted_f`` counts groups scored and kept, trained or not.
Evicted, dropped and replaced groups leave both counts. Eviction bounds what may be trained: a group is doomed when
the learner's version minus the oldest version any member has sampled exceeds ``max_staleness`` (RollArt, arXiv
2512.22560, section 6.2). docs/staleness.md argues why the bound holds. Nothing here knows a clock, a worker or a store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from resources.environments.family import FamilyConfig
from resources.failures import FailureClass
from resources.rollout.config import RolloutConfig
from resources.rollout.gate_counters import batch_counters, count_cancelled, count_evicted
from resources.rollout.gate_events import (
    BatchRequested,
    Cancel,
    CancelTermination,
    Decision,
    Event,
    FirstSampled,
    MemberDone,
    NoSignal,
    Opened,
    ScoreArrived,
    ScoreOverdue,
    Start,
    TakeBatch,
    TrajectoryLost,
    VersionLoaded,
)
from resources.rollout.gate_invariants import check_invariants
from resources.rollout.group_state import (
    ATTEMPTS_OF_A_LIFE,
    FamilyState,
    Group,
    Member,
    MemberState,
    group_as_json,
    group_from_json,
)


class StalenessGate:
    """Groups and their staleness, for all families of a run.

    `handle` takes one event and returns the decisions that follow, in order. Events about trajectories that the gate no
    longer waits for (late, duplicate, unknown) change nothing but the counter ``ignored_events``.
    """

    def __init__(
        self,
        run_id: str,
        families: Mapping[str, FamilyConfig],
        config: RolloutConfig,
        *,
        seed_env: Callable[[str, int], int] = lambda family, prompt_index: prompt_index,
        num_batches: int | None = None,
    ) -> None:
        """
        Args:
            seed_env: ``seed_env(family, prompt_index)`` is the seed recorded in a batch's groups.
            num_batches: batches that will ever be taken, those before a resume included; None: no end is known. Nothing
                is started that no batch could hold.
        """
        self.run_id = run_id
        self.config = config
        self.num_batches = num_batches
        self.version = 0
        """The version the engines serve."""
        self.horizon = 0
        """The learner's version of the next batch, as far as known: the version that lags are counted from."""
        self.next_batch = 0
        """Version of the next batch to be taken; the batches before it are trained, or in training."""
        self.families = {name: FamilyState(family) for name, family in families.items()}
        self.seats: dict[str, tuple[Group, Member]] = {}
        """Trajectories that the gate waits for: started (running), or awaiting their score."""
        self.cancelled: dict[str, tuple[str, CancelTermination]] = {}
        """Cancelled trajectories whose end was not reported yet."""
        self.num_ignored = 0
        self.first_attempt = 0
        """Of new groups; grows with every resume."""
        self.is_open = False
        self._seed_env = seed_env
        self._counted_at_last_batch: dict[str, dict[str, int]] = {}

    # -- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Decision]:
        """Apply one event. Raises ValueError on events that no correct driver sends (a version that goes back, a
        batch out of order)."""
        out: list[Decision] = []
        match event:
            case Opened():
                self.is_open = True
            case VersionLoaded(version):
                self._load(version, out)
            case FirstSampled(trajectory_id, version):
                self._sampled(trajectory_id, version, out)
            case MemberDone():
                self._done(event, out)
            case TrajectoryLost(trajectory_id):
                self._lost(trajectory_id, out)
            case ScoreArrived(score):
                seat = self._awaiting(score.trajectory_id)
                if seat is None:
                    self.num_ignored += 1
                elif score.failure is not None or score.reward is None:
                    self._fail(*seat, score.failure or FailureClass.REWARD, out)
                else:
                    seat[1].scorer_version = score.scorer_version
                    self._score(*seat, score.reward, score.success, out)
            case ScoreOverdue(trajectory_id):
                seat = self._awaiting(trajectory_id)
                if seat is None:
                    self.num_ignored += 1
                else:
                    self._fail(*seat, FailureClass.REWARD, out)
            case BatchRequested(version):
                self._take(version, out)
        if self.is_open:
            self._admit(out)
        return out

    def _load(self, version: int, out: list[Decision]) -> None:
        if version < self.version:
            raise ValueError(f"version {version} was loaded after version {self.version}: versions only grow")
        self.version = version
        # A version is an update, and an update counts as a full share, even one whose batch was never taken from here.
        self.next_batch = max(self.next_batch, version)
        if self.next_batch == version:
            for family in self.families.values():
                family.num_trained += len(family.in_training)
                family.in_training = []
        self._evict_beyond(version, out)

    def _sampled(self, trajectory_id: str, version: int, out: list[Decision]) -> None:
        seat = self.seats.get(trajectory_id)
        if seat is None:
            if trajectory_id not in self.cancelled:
                self.num_ignored += 1
            return
        group, member = seat
        if member.oldest_version is None or version < member.oldest_version:
            member.oldest_version = version
        self._evict_if_doomed(group, out)

    def _done(self, event: MemberDone, out: list[Decision]) -> None:
        done = event.done
        if self._confirm_cancelled(done.trajectory_id, done):
            return
        seat = self.seats.get(done.trajectory_id)
        if seat is None or seat[1].state is not MemberState.RUNNING:
            self.num_ignored += 1
            return
        group, member = seat
        member.done = done
        if done.failure is not None and not done.failure.is_scored:
            self._fail(group, member, done.failure, out)
            return
        assert done.ref is not None, ("a trajectory without a failure has a row", done)
        assert done.awaits_score or done.reward is not None, ("an unscored trajectory names its failure", done)
        member.oldest_version = done.oldest_version
        member.state = MemberState.AWAITING_SCORE
        if self._evict_if_doomed(group, out):
            return
        if not done.awaits_score:
            assert done.reward is not None
            member.scorer_version = done.scorer_version
            self._score(group, member, done.reward, done.success, out)

    def _lost(self, trajectory_id: str, out: list[Decision]) -> None:
        if self._confirm_cancelled(trajectory_id, None):
            return
        seat = self.seats.get(trajectory_id)
        if seat is None or seat[1].state is not MemberState.RUNNING:
            self.num_ignored += 1  # a sealed row outlives its worker: its score is still awaited
            return
        self._fail(*seat, FailureClass.INFRASTRUCTURE, out)

    def _take(self, version: int, out: list[Decision]) -> None:
        if version != self.next_batch:
            raise ValueError(f"batch {version} was asked for, but the next one is batch {self.next_batch}")
        self._evict_beyond(version, out)
        wanted = {name: family.config.groups_per_iteration for name, family in self.families.items()}
        if any(len(family.complete) < wanted[name] for name, family in self.families.items()):
            return
        groups = []
        for name, family in self.families.items():
            family.num_trained += len(family.in_training)
            family.in_training = [family.complete.popleft() for _ in range(wanted[name])]
            family.num_replaced_for_batch = 0
            groups += family.in_training
        self.next_batch = version + 1
        counters = {
            f"{figure}/{name}": value
            for name, family in self.families.items()
            for figure, value in batch_counters(family, version, self._counted_at_last_batch.get(name, {})).items()
        }
        self._counted_at_last_batch = {name: dict(family.counts) for name, family in self.families.items()}
        batch_groups = tuple(group.as_batch_group(self._seed_env(group.family, group.prompt_index)) for group in groups)
        out.append(TakeBatch(version, batch_groups, counters))

    # -- members -----------------------------------------------------------------------------------------------------

    def _awaiting(self, trajectory_id: str) -> tuple[Group, Member] | None:
        seat = self.seats.get(trajectory_id)
        return seat if seat is not None and seat[1].state is MemberState.AWAITING_SCORE else None

    def _confirm_cancelled(self, trajectory_id: str, done: Any) -> bool:
        """Book the end of a cancelled trajectory; False if it was not one."""
        known = self.cancelled.pop(trajectory_id, None)
        if known is None:
            return False
        family, termination = known
        count_cancelled(self.families[family].counts, termination, done)
        return True

    def _score(self, group: Group, member: Member, reward: float, success: bool | None, out: list[Decision]) -> None:
        del self.seats[self.trajectory_id(group, member)]
        member.state, member.reward, member.success = MemberState.SCORED, reward, success
        counts = self.families[group.family].counts
        counts["scored"] += 1
        counts["truncated"] += int(member.done is not None and member.done.truncated)
        self._settle(group, out)

    def _fail(self, group: Group, member: Member, failure: FailureClass, out: list[Decision]) -> None:
        del self.seats[self.trajectory_id(group, member)]
        family = self.families[group.family]
        family.counts[f"failed.{failure}"] += 1
        member.num_failures += 1
        retry = self.config.member_failure != "fail_fast" and member.num_failures <= self.config.max_member_retries
        if retry:
            family.counts["retried"] += 1
            member.play_again()
            if group.group_id in family.running:
                self._start(group, member, out, is_retry=True)
            return
        member.state = MemberState.FAILED
        member.oldest_version = None
        if self.config.member_failure == "fail_fast":
            self._drop_failed(group, out)
        else:
            self._settle(group, out)

    # -- groups ------------------------------------------------------------------------------------------------------

    def _settle(self, group: Group, out: list[Decision]) -> None:
        """Accept a group that has what it wants, drop one that cannot get it any more, leave the others."""
        if group.group_id not in self.families[group.family].running:
            return  # resumed with scores outstanding and not admitted yet: settled when it is
        num_scored, num_alive = group.count(MemberState.SCORED), group.num_alive
        if num_scored >= group.group_size:
            self._accept(group, out)
        elif num_scored + num_alive >= group.group_size:
            return
        elif self.config.member_failure == "minimum_group" and num_scored + num_alive >= self._minimum(group):
            if num_alive == 0:
                self.families[group.family].counts["short_groups"] += 1
                self._accept(group, out)
        else:
            self._drop_failed(group, out)

    def _minimum(self, group: Group) -> int:
        return min(self.config.minimum_group, group.group_size)

    def _accept(self, group: Group, out: list[Decision]) -> None:
        family = self.families[group.family]
        self._cancel_members(group, "cancelled_redundant", out)
        del family.running[group.group_id]
        if not group.has_signal:
            family.counts["dead_groups"] += 1
            if self.config.dynamic_sampling:
                family.counts["replaced_groups"] += 1
                family.num_dropped += 1
                family.num_replaced_for_batch += 1
                if family.num_replaced_for_batch > self.config.max_replaced_groups:
                    out.append(NoSignal(group.family, family.num_replaced_for_batch))
                return
        family.counts["accepted_groups"] += 1
        family.complete.append(group)
        if self.accepted(group.family) >= self.budget(group.family):
            # What still runs was redundant: the batches that this version may fill are full.
            for redundant in list(family.running.values()):
                self._give_up(redundant, "cancelled_redundant", out)
                family.counts["redundant_groups"] += 1

    def _drop_failed(self, group: Group, out: list[Decision]) -> None:
        self.families[group.family].counts["failed_groups"] += 1
        self._issue_again_or_drop(group, "preempted", "dropped_failed", out)

    def _evict_beyond(self, version: int, out: list[Decision]) -> None:
        self.horizon = max(self.horizon, version)
        for family in self.families.values():
            for group in [*family.complete, *family.running.values(), *family.waiting]:
                self._evict_if_doomed(group, out)

    def _evict_if_doomed(self, group: Group, out: list[Decision]) -> bool:
        if self.config.stale_policy != "evict" or not self.is_doomed(group):
            return False
        count_evicted(self.families[group.family].counts, group, self.horizon)
        self._issue_again_or_drop(group, "evicted_stale", "dropped_stale", out)
        return True

    def _issue_again_or_drop(
        self, group: Group, termination: CancelTermination, counter: str, out: list[Decision]
    ) -> None:
        family = self.families[group.family]
        if group.num_reissues >= self.config.max_reissues:
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

    # -- admission ---------------------------------------------------------------------------------------------------

    def budget(self, family_name: str) -> int:
        """Groups of a family that may ever be accepted up to the version served now."""
        num_batches = self.config.max_staleness + self.version + 1
        if self.num_batches is not None:
            num_batches = min(num_batches, self.num_batches)
        return num_batches * self.families[family_name].config.groups_per_iteration

    def accepted(self, family_name: str) -> int:
        """Groups scored and kept, trained or not; an update counts as a full share."""
        family = self.families[family_name]
        return self.next_batch * family.config.groups_per_iteration + len(family.complete)

    def admissible(self, family_name: str) -> int:
        """Groups that may start now."""
        family = self.families[family_name]
        num_running = len(family.running)
        return min(
            family.config.max_concurrent_groups - num_running,
            self.budget(family_name) + family.config.redundant_groups - self.accepted(family_name) - num_running,
        )

    def _admit(self, out: list[Decision]) -> None:
        """Start what may start, one group of each family in turn, so that no family waits behind another's burst."""
        progressed = True
        while progressed:
            progressed = False
            for name, family in self.families.items():
                if self.admissible(name) <= 0 or self._is_full(name):
                    continue
                progressed = True
                if family.waiting:
                    group = family.waiting.popleft()
                else:
                    group = Group.new(name, family.cursor, family.config, self.first_attempt)
                    family.cursor += 1
                family.running[group.group_id] = group
                family.counts["started_groups"] += 1
                for member in group.members:
                    if member.state is MemberState.PENDING:
                        self._start(group, member, out, is_retry=False)
                self._settle(group, out)

    def _is_full(self, family_name: str) -> bool:
        """Redundant groups start only beside wanted ones, never once the wanted ones are all scored."""
        return self.accepted(family_name) >= self.budget(family_name)

    def _start(self, group: Group, member: Member, out: list[Decision], *, is_retry: bool) -> None:
        trajectory_id = self.trajectory_id(group, member)
        member.state = MemberState.RUNNING
        self.seats[trajectory_id] = (group, member)
        out.append(
            Start(
                trajectory_id, group.family, group.group_id, group.prompt_index, member.index, member.attempt,
                group.group_size, is_retry,
            )
        )  # fmt: skip

    # -- questions ---------------------------------------------------------------------------------------------------

    def trajectory_id(self, group: Group, member: Member) -> str:
        return f"{self.run_id}/{group.group_id}/{member.index}/{member.attempt}"

    def is_doomed(self, group: Group) -> bool:
        """Whether a group can no longer be trained within the bound."""
        oldest = group.oldest_version
        return oldest is not None and self.horizon - oldest > self.config.max_staleness

    def awaits_score(self, trajectory_id: str) -> bool:
        return self._awaiting(trajectory_id) is not None

    def awaiting_score(self) -> list[str]:
        return [key for key, (_, member) in self.seats.items() if member.state is MemberState.AWAITING_SCORE]

    def missing(self) -> dict[str, int]:
        """Complete groups that the next batch still lacks, by family (families that have theirs are left out)."""
        lacking = {name: f.config.groups_per_iteration - len(f.complete) for name, f in self.families.items()}
        return {name: number for name, number in lacking.items() if number > 0}

    def validate(self) -> None:
        """Check every invariant aloud (AssertionError naming the objects). Tests call it after each event."""
        check_invariants(self)

    # -- resume ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state from which `restore` goes on: nothing trained twice, nothing skipped."""
        return {
            "format": 1,
            "version": self.version,
            "next_batch": self.next_batch,
            "families": {
                name: {
                    "cursor": family.cursor,
                    "num_trained": family.num_trained,
                    "num_dropped": family.num_dropped,
                    "num_replaced_for_batch": family.num_replaced_for_batch,
                    "counts": dict(family.counts),
                    "in_training": [group_as_json(group) for group in family.in_training],
                    "complete": [group_as_json(group) for group in family.complete],
                    "open": [group_as_json(group) for group in family.open_groups()],
                }
                for name, family in self.families.items()
            },
        }

    def restore(self, state: Mapping[str, Any], version: int | None = None) -> None:
        """Go on from a snapshot, at policy ``version`` (default: the snapshot's own).

        Scored, unconsumed groups and scored members are kept; what was being played is issued again under a new attempt
        number; a batch that was taken but whose update is not part of ``version`` goes back to the head of the queue.
        Without ``families`` in the state (nothing but a version is known), the cursors stand at the prompts trained.
        ``life`` in the state says how often the run was resumed: ids of trajectories that a killed driver started after
        the snapshot never return, so that no row or score of theirs is taken for a new one's.
        """
        assert not self.is_open and not self.seats, "restore comes before the first event"
        self.version = self.horizon = version if version is not None else int(state["version"])
        self.next_batch = self.version
        self.first_attempt = ATTEMPTS_OF_A_LIFE * int(state.get("life", 0))
        stored_families = state.get("families", {})
        unknown = set(stored_families) - set(self.families)
        if unknown:
            raise ValueError(f"the saved run has the families {sorted(unknown)}, which this configuration lacks")
        for name, family in self.families.items():
            stored = stored_families.get(name)
            if stored is None:
                family.cursor = family.num_trained = self.next_batch * family.config.groups_per_iteration
                continue
            family.cursor = stored["cursor"]
            family.num_trained, family.num_dropped = stored["num_trained"], stored["num_dropped"]
            family.num_replaced_for_batch = stored["num_replaced_for_batch"]
            family.counts.update(stored["counts"])
            taken = [group_from_json(record) for record in stored["in_training"]]
            if int(state["next_batch"]) > self.version:
                family.complete.extend(taken)
            else:
                family.num_trained += len(taken)
            family.complete.extend(group_from_json(record) for record in stored["complete"])
            family.waiting.extend(group_from_json(record) for record in stored["open"])
            for group in (*family.complete, *family.waiting):
                for member in group.members:
                    member.enter_life(self.first_attempt)
                    if member.state is MemberState.AWAITING_SCORE:
                        self.seats[self.trajectory_id(group, member)] = (group, member)
        self._counted_at_last_batch = {name: dict(family.counts) for name, family in self.families.items()}
