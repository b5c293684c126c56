"""Which prompt does the next group of a family get? A new one each, or one of a pool in a new order every epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from resources.rollout.curriculum import SuccessRecord

PromptOrder = Callable[[str, int, int], Sequence[int]]
"""(family, epoch, number of prompts) -> the prompts 0 .. number - 1 in the order of that epoch."""


@dataclass(slots=True)
class Prompts:
    """The data cursor of one family."""

    family: str
    num_prompts: int | None
    """Size of the pool; None: every group gets a prompt that none had before."""
    order: PromptOrder
    epoch: int = 0
    position: int = 0
    """In the order of this epoch; without a pool, the next prompt."""
    records: dict[int, SuccessRecord] = field(default_factory=dict)
    """Success so far, by prompt of the pool (kept only with a pool)."""
    _of_epoch: Sequence[int] = ()

    def draw(self, plays: Callable[[int, SuccessRecord, int], bool] | None = None) -> tuple[int, int]:
        """The next prompt that is played, and how many were passed over before it, by ``plays(prompt, record, epoch)``.

        When a whole pool's worth of prompts in a row is passed over, the next one is played all the same: a curriculum
        chooses, it does not end a run.
        """
        if self.num_prompts is None:
            return self._next(), 0
        for num_skipped in range(self.num_prompts):
            prompt, epoch = self._next(), self.epoch
            if plays is None or plays(prompt, self.records.get(prompt, SuccessRecord()), epoch):
                return prompt, num_skipped
        return self._next(), self.num_prompts

    def _next(self) -> int:
        if self.num_prompts is None:
            self.position += 1
            return self.position - 1
        if self.position >= self.num_prompts:
            self.epoch, self.position, self._of_epoch = self.epoch + 1, 0, ()
        if not self._of_epoch:
            self._of_epoch = tuple(self.order(self.family, self.epoch, self.num_prompts))
            assert sorted(self._of_epoch) == list(range(self.num_prompts)), ("an order of all prompts", self._of_epoch)
        self.position += 1
        return self._of_epoch[self.position - 1]

    def pass_over(self, number: int) -> None:
        """Go on behind so many prompts, drawn by a run of which nothing else is known."""
        self.epoch, self.position = (0, number) if self.num_prompts is None else divmod(number, self.num_prompts)

    def note(self, prompt: int, success: float) -> None:
        """A group of this prompt was scored."""
        if self.num_prompts is not None:
            self.records[prompt] = self.records.get(prompt, SuccessRecord()).after(success)

    def snapshot(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self.position,
            "records": {str(prompt): record.as_json() for prompt, record in self.records.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self._of_epoch = state["epoch"], state["position"], ()
        self.records = {int(prompt): SuccessRecord(*record) for prompt, record in state["records"].items()}
