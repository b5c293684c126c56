"""How many groups of each family does a batch hold? Exactly its quota, or, over a window, its quota on average.

Without a window every batch holds exactly the quotas, and waits for the slowest family. With one, a batch goes as soon
as its *total* is there: a late family is *owed* what it misses, families that have groups to spare fill its places and
are *ahead* by as much (owed a negative number), and later batches make good for both. Three rules bound this, for every
family f, with owed_f(b) after batch b and W batches in the window:

1. ``|owed_f(b)| <= slack_f``, where ``slack_f = min(share_slack, quota_f - 1)``: no batch lacks a family altogether;
2. ``|owed_f(b) - owed_f(b - W)| <= slack_f``: any W batches in a row trained W quotas of f, up to slack_f groups;
3. owed_f is 0 at least once in any W batches in a row: what was missed is made good within the window.

Paying everything back, ``owed_f(b) = 0``, obeys all three at any time, so waiting for late groups always ends the wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class FamilyShare:
    """The account of one family, in groups."""

    planned: int = 0
    """Quotas of all batches before the next one."""
    owed: int = 0
    """Of them not trained yet; negative: the family is ahead."""
    points: deque[int] = field(default_factory=deque)
    """``owed`` after each of the last batches, newest last; before the first batch nothing was owed."""

    @property
    def trained(self) -> int:
        return self.planned - self.owed


class Shares:
    """Quotas of the batches to come, and what is owed from those before.

    A quota is fixed for the batches that may be worked on already; later ones have the newest quota known.
    """

    def __init__(
        self, quotas: Mapping[str, int], *, window: int | None = None, slack: int = 1, num_taken_back: int = 1
    ) -> None:
        """
        Args:
            quotas: groups of each family in a batch.
            window: batches over which the quotas hold (at least 2); None: every single batch.
            slack: groups by which a family may be late or ahead in between.
            num_taken_back: batches that a resume may take back, at most; the window before them must be known still.
        """
        assert window is None or window >= 2, ("a window of one batch is no window", window)
        self.window = window
        self._slack = slack if window is not None else 0
        self._num_points = (window or 1) + num_taken_back
        self.families = {name: FamilyShare(points=deque([0], self._num_points)) for name in quotas}
        self.next_batch = 0
        self._fixed: deque[dict[str, int]] = deque()
        """Of next_batch and those that follow it."""
        self._newest = dict(quotas)

    # -- quotas ------------------------------------------------------------------------------------------------------

    def quota(self, family: str, batch: int) -> int:
        """Groups of a family in batch ``batch``, which was not taken yet."""
        ahead = batch - self.next_batch
        assert ahead >= 0, ("the batch was taken", batch, self.next_batch)
        return (self._fixed[ahead] if ahead < len(self._fixed) else self._newest)[family]

    def fix(self, last_batch: int, quotas: Mapping[str, int]) -> None:
        """Quotas for the batches up to ``last_batch`` that have none of their own yet, and until new ones are fixed."""
        assert quotas.keys() == self.families.keys() and min(quotas.values()) >= 1, ("quotas", quotas)
        self._newest = dict(quotas)
        while self.next_batch + len(self._fixed) <= last_batch:
            self._fixed.append(self._newest)

    def planned(self, family: str, num_batches: int) -> int:
        """Sum of a family's quotas over the first ``num_batches`` batches, or over those taken if these are more."""
        to_come = range(self.next_batch, max(num_batches, self.next_batch))
        return self.families[family].planned + sum(self.quota(family, batch) for batch in to_come)

    def wanted(self, family: str) -> int:
        """Groups of a family with which the next batch pays everything back."""
        return max(1, self.quota(family, self.next_batch) + self.families[family].owed)

    # -- batches -----------------------------------------------------------------------------------------------------

    def allot(self, complete: Mapping[str, int]) -> dict[str, int] | None:
        """Groups of each family in the next batch, out of so many complete ones; None: it must wait."""
        wanted = {name: self.wanted(name) for name in self.families}
        taken = {name: min(complete[name], number) for name, number in wanted.items()}
        limits = {name: self._limits(name) for name in self.families}
        if any(taken[name] < limits[name][0] for name in taken):
            return None
        for _ in range(sum(wanted.values()) - sum(taken.values())):
            able = [name for name in taken if taken[name] < min(complete[name], limits[name][1])]
            if not able:
                return None
            # The one that is least ahead afterwards, so that nobody is ahead by more than it must be.
            taken[max(able, key=lambda name: wanted[name] - taken[name])] += 1
        return taken

    def slack(self, name: str) -> int:
        """Groups by which a family may be late or ahead after the next batch."""
        return min(self._slack, self.quota(name, self.next_batch) - 1)

    def _limits(self, name: str) -> tuple[int, int]:
        """Least and most groups of a family in the next batch."""
        share, wanted, slack = self.families[name], self.wanted(name), self.slack(name)
        if self.window is None or slack <= 0:
            return wanted, wanted
        points = list(share.points)
        if len(points) >= self.window - 1 and all(points[-(self.window - 1) :]):
            return wanted, wanted
        before = points[-self.window] if len(points) >= self.window else 0
        lowest, highest = max(-slack, before - slack), min(slack, before + slack)
        at_zero = self.quota(name, self.next_batch) + share.owed
        return max(1, min(wanted, at_zero - highest)), max(wanted, at_zero - lowest)

    def take(self, taken: Mapping[str, int]) -> None:
        """The next batch was taken with so many groups of each family."""
        for name, share in self.families.items():
            quota = self.quota(name, self.next_batch)
            share.planned += quota
            share.owed += quota - taken[name]
            share.points.append(share.owed)
        self._advance()

    def pass_by(self, next_batch: int) -> None:
        """Batches before ``next_batch`` were trained elsewhere: each counts as its quotas."""
        while self.next_batch < next_batch:
            self.take({name: self.quota(name, self.next_batch) for name in self.families})
            for share in self.families.values():  # windows are judged over batches that were taken from here
                share.points = deque([share.owed], self._num_points)

    def _advance(self) -> None:
        self.next_batch += 1
        if self._fixed:
            self._fixed.popleft()

    # -- resume ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return {
            "next_batch": self.next_batch,
            "newest": self._newest,
            "fixed": list(self._fixed),
            "families": {
                name: {"planned": share.planned, "owed": share.owed, "points": list(share.points)}
                for name, share in self.families.items()
            },
        }

    def restore(self, state: Mapping[str, Any], next_batch: int, in_training: Mapping[str, int]) -> None:
        """Go on from a snapshot, with ``next_batch`` as the next one.

        Args:
            in_training: groups of each family in the batch taken last. It is taken back when it is not trained.
        """
        self.next_batch = int(state["next_batch"])
        self._fixed = deque({**self._newest, **quotas} for quotas in state["fixed"])
        for name, share in self.families.items():
            stored = state["families"].get(name)
            if stored is None:  # a family that the saved run did not have
                share.planned = self.next_batch * self._newest[name]
                continue
            share.planned, share.owed = stored["planned"], stored["owed"]
            share.points = deque(stored["points"], self._num_points)
        while self.next_batch > next_batch:
            self._take_back(in_training)
            in_training = {}  # of older batches only the quotas are known
        self.pass_by(next_batch)

    def _take_back(self, taken: Mapping[str, int]) -> None:
        quotas = {}
        for name, share in self.families.items():
            if len(share.points) > 1:
                share.points.pop()
            before = share.points[-1]
            quotas[name] = share.owed - before + taken[name] if name in taken else self._newest[name]
            share.planned -= quotas[name]
            share.owed = before
        self.next_batch -= 1
        self._fixed.appendleft(quotas)
