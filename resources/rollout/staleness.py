"""The staleness gate: which groups may start, which may be trained. A pure state machine: events in, decisions out.

Admission (admission.py) bounds how many groups start; eviction bounds what may be trained: a group is doomed when
the learner's version minus the oldest version any member has sampled exceeds ``lag_bound`` (RollArt, arXiv 2512.22560,
section 6.2), which is ``max_staleness`` except with cross-policy sampling. docs/staleness.md argues why the bound
holds. Nothing here knows a clock, a worker or a store.

| question                                                  | file                 |
|-----------------------------------------------------------|----------------------|
| what follows from an event, what is trained               | this one             |
| how many groups may start now                             | admission.py         |
| what becomes of a group when a member is scored or fails  | group_book.py        |
| how many groups of each family a batch holds              | shares.py            |
| which prompt the next group gets, what is worth playing   | prompts.py, curriculum.py |
| what a resume goes on from                                | gate_snapshot.py     |
| what must always be true                                  | gate_invariants.py   |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from resources.environments.family import FamilyConfig
from resources.failures import FailureClass
from resources.rollout.admission import Admission
from resources.rollout.config import RolloutConfig
from resources.rollout.curriculum import checked_quotas, make_curriculum
from resources.rollout.gate_counters import counters_of_batch
from resources.rollout.gate_events import (
    BatchRequested,
    Decision,
    Event,
    FirstSampled,
    MemberDone,
    Opened,
    ScoreArrived,
    ScoreOverdue,
    TakeBatch,
    TrajectoryLost,
    VersionLoaded,
)
from resources.rollout.gate_invariants import check_invariants
from resources.rollout.gate_snapshot import restore, snapshot
from resources.rollout.group_book import GroupBook
from resources.rollout.group_state import FamilyState, Group, Member, MemberState
from resources.rollout.logical_time import in_static_order
from resources.rollout.messages import BatchGroup
from resources.rollout.prompts import PromptOrder, Prompts
from resources.rollout.shares import Shares


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
        prompt_order: PromptOrder = lambda family, epoch, num_prompts: range(num_prompts),
        num_batches: int | None = None,
    ) -> None:
        """
        Args:
            seed_env: ``seed_env(family, prompt_index)`` is the seed recorded in a batch's groups.
            prompt_order: order of a family's pool of prompts in an epoch.
            num_batches: batches that will ever be taken, those before a resume included; None: no end is known. Nothing
                is started that no batch could hold.
        Raises ValueError for a curriculum that cannot be made.
        """
        self.run_id = run_id
        self.config = config
        self.families = {
            name: FamilyState(family, Prompts(name, family.num_prompts, prompt_order))
            for name, family in families.items()
        }
        self.configured = {name: family.groups_per_iteration for name, family in families.items()}
        self.shares = Shares(
            self.configured,
            window=config.share_window,
            slack=config.share_slack,
            num_taken_back=config.max_staleness + 1,
        )
        self.admission = Admission(self.families, self.shares, config, num_batches)
        self.book = GroupBook(run_id, self.families, config, self.admission.is_full)
        self.num_ignored = 0
        self.first_attempt = 0
        """Of new groups; grows with every resume."""
        self.is_open = False
        self.counted_at_last_batch: dict[str, dict[str, int]] = {}
        self.curriculum = make_curriculum(config.curriculum, config.curriculum_arguments)
        self._seed_env = seed_env

    # -- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Decision]:
        """Apply one event. Raises ValueError on events that no correct driver sends (a version that goes back, a
        batch out of order)."""
        out: list[Decision] = []
        match event:
            case Opened():
                self.is_open = True
                self._fix_quotas()
            case VersionLoaded(version):
                self._load(version, out)
            case FirstSampled(trajectory_id, version):
                self._sampled(trajectory_id, version, out)
            case MemberDone():
                self._done(event, out)
            case TrajectoryLost(trajectory_id):
                self._lost(trajectory_id, out)
            case ScoreArrived():
                self._scored(event, out)
            case ScoreOverdue(trajectory_id):
                seat = self.book.awaiting(trajectory_id)
                if seat is None:
                    self.num_ignored += 1
                else:
                    self.book.fail(*seat, FailureClass.REWARD, out)
            case BatchRequested(version):
                self._take(version, out)
        if self.is_open:
            self._admit(out)
        return out

    def _load(self, version: int, out: list[Decision]) -> None:
        if version < self.version:
            raise ValueError(f"version {version} was loaded after version {self.version}: versions only grow")
        self.admission.version = version
        # A version is an update, and an update counts as a full share, even one whose batch was never taken from here.
        self.shares.pass_by(version)
        self._fix_quotas()
        if self.next_batch == version:
            for family in self.families.values():
                family.num_trained += len(family.in_training)
                family.in_training = []
        self.book.evict_beyond(version, out)

    def _sampled(self, trajectory_id: str, version: int, out: list[Decision]) -> None:
        seat = self.seats.get(trajectory_id)
        if seat is None:
            if trajectory_id not in self.book.cancelled:
                self.num_ignored += 1
            return
        group, member = seat
        if member.oldest_version is None or version < member.oldest_version:
            member.oldest_version = version
        self._evict_if_too_old(group, version, out)

    def _done(self, event: MemberDone, out: list[Decision]) -> None:
        done = event.done
        if self.book.confirm_cancelled(done.trajectory_id, done):
            return
        seat = self.book.running(done.trajectory_id)
        if seat is None:
            self.num_ignored += 1
            return
        group, member = seat
        member.done = done
        if done.failure is not None and not done.failure.is_scored:
            self.book.fail(group, member, done.failure, out)
            return
        assert done.ref is not None, ("a trajectory without a failure has a row", done)
        assert done.awaits_score or done.reward is not None, ("an unscored trajectory names its failure", done)
        member.oldest_version = done.oldest_version
        member.state = MemberState.AWAITING_SCORE
        if self._evict_if_too_old(group, done.oldest_version, out):
            return
        if not done.awaits_score:
            assert done.reward is not None
            member.scorer_version = done.scorer_version
            self.book.score(group, member, done.reward, done.success, out)

    def _evict_if_too_old(self, group: Group, version: int | None, out: list[Decision]) -> bool:
        """A member has told the oldest ``version`` it sampled. A deterministic batch is of one version: an engine that
        missed a switch (it was being built meanwhile) must not leave its tokens in it, however young they are."""
        if self.config.deterministic and version is not None and version < self.version:
            self.book.evict(group, out)
            return True
        return self.book.evict_if_doomed(group, out)

    def _lost(self, trajectory_id: str, out: list[Decision]) -> None:
        if self.book.confirm_cancelled(trajectory_id, None):
            return
        seat = self.book.running(trajectory_id)
        if seat is None:
            self.num_ignored += 1  # a sealed row outlives its worker: its score is still awaited
            return
        self.book.fail(*seat, FailureClass.INFRASTRUCTURE, out)

    def _scored(self, event: ScoreArrived, out: list[Decision]) -> None:
        score = event.score
        seat = self.book.awaiting(score.trajectory_id)
        if seat is None:
            self.num_ignored += 1
        elif score.failure is not None or score.reward is None:
            self.book.fail(*seat, score.failure or FailureClass.REWARD, out)
        else:
            seat[1].scorer_version = score.scorer_version
            self.book.score(*seat, score.reward, score.success, out)

    def _take(self, version: int, out: list[Decision]) -> None:
        if version != self.next_batch:
            raise ValueError(f"batch {version} was asked for, but the next one is batch {self.next_batch}")
        self.book.evict_beyond(version, out)
        allotted = self.shares.allot({name: len(family.complete) for name, family in self.families.items()})
        if allotted is None:
            return
        groups: list[Group] = []
        for name, family in self.families.items():
            family.num_trained += len(family.in_training)
            family.in_training = [family.complete.popleft() for _ in range(allotted[name])]
            if self.config.deterministic:
                family.in_training = in_static_order(family.in_training)
            family.lost_for_batch.clear()
            groups += family.in_training
        self.shares.take(allotted)
        counters = counters_of_batch(self, version)
        batch_groups = tuple(group.as_batch_group(self._seed_env(group.family, group.prompt_index)) for group in groups)
        out.append(TakeBatch(version, batch_groups, counters))

    def reserved(self, version: int) -> tuple[BatchGroup, ...]:
        """Groups that batch ``version``, not taken yet, is sure to hold, family by family in order of completion.

        Only more are added until the batch is taken: once everything too old for it is gone, complete groups are not
        evicted before it, and a batch takes the first complete groups of a family, at least those that its quota and
        what it is owed ask for. () until the batch was asked for, or its version is served.
        """
        if version != self.next_batch or self.horizon < version:
            return ()
        return tuple(
            group.as_batch_group(self._seed_env(group.family, group.prompt_index))
            for name, family in self.families.items()
            for group in islice(family.complete, self.shares.wanted(name))
        )

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, out: list[Decision]) -> None:
        """Start what may start, one group of each family in turn, so that no family waits behind another's burst."""
        progressed = True
        while progressed:
            progressed = False
            for name, family in self.families.items():
                if self.admission.admissible(name) <= 0 or self.admission.is_full(name):
                    continue
                progressed = True
                self.book.start(family.waiting.popleft() if family.waiting else self._issue(name), out)

    def _issue(self, family_name: str) -> Group:
        """A new group, with the next prompt of its family."""
        curriculum, family = self.curriculum, self.families[family_name]
        plays = None if curriculum is None else lambda *of_prompt: curriculum.plays(family_name, *of_prompt)
        prompt_index, num_skipped = family.prompts.draw(plays)
        family.counts["skipped_prompts"] += num_skipped
        group = Group.new(family_name, family.cursor, prompt_index, family.config, self.first_attempt)
        family.cursor += 1
        return group

    def _fix_quotas(self) -> None:
        """Batches that groups may start for now keep the quotas that they started with."""
        if self.curriculum is None:
            return
        last_batch = self.version + self.config.max_staleness
        success = {name: family.success for name, family in self.families.items()}
        self.shares.fix(last_batch, checked_quotas(self.curriculum, last_batch, self.configured, success))

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version the engines serve."""
        return self.admission.version

    @property
    def next_batch(self) -> int:
        """Version of the next batch to be taken; the batches before it are trained, or in training."""
        return self.shares.next_batch

    @property
    def horizon(self) -> int:
        """The learner's version of the next batch, as far as known: the version that lags are counted from."""
        return self.book.horizon

    @property
    def seats(self) -> dict[str, tuple[Group, Member]]:
        """Trajectories that the gate waits for: started (running), or awaiting their score."""
        return self.book.seats

    def trajectory_id(self, group: Group, member: Member) -> str:
        return self.book.trajectory_id(group, member)

    def awaits_score(self, trajectory_id: str) -> bool:
        return self.book.awaiting(trajectory_id) is not None

    def awaiting_score(self) -> list[str]:
        return [key for key, (_, member) in self.seats.items() if member.state is MemberState.AWAITING_SCORE]

    def missing(self) -> dict[str, int]:
        """Complete groups that the next batch still lacks, by family (families that have theirs are left out)."""
        lacking = {name: self.shares.wanted(name) - len(f.complete) for name, f in self.families.items()}
        return {name: number for name, number in lacking.items() if number > 0}

    def validate(self) -> None:
        """Check every invariant aloud (AssertionError naming the objects). Tests call it after each event."""
        check_invariants(self)

    # -- resume ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state from which `restore` goes on: nothing trained twice, nothing skipped."""
        return snapshot(self)

    def restore(self, state: Mapping[str, Any], version: int | None = None) -> None:
        """Go on from a snapshot, at policy ``version`` (default: the snapshot's own); see gate_snapshot.py."""
        restore(self, state, version)
