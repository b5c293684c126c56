"""What every side of `benchmarks.peers` is asked to do, and what it must report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from resources.environments.family import FamilyConfig
from resources.environments.seeds import episode_seed
from tasks.training.config import TrainingConfig


class PeerSpec(BaseModel):
    """One measurement of one side. Travels as a JSON file between interpreters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_directory: str
    """Hugging Face directory that training starts from; the same for every side."""
    output_directory: str
    """Where the side writes the policy it ends with, as a Hugging Face directory."""
    families: dict[str, FamilyConfig] = Field(min_length=1)
    training: TrainingConfig
    context_length: int
    """Tokens of one trajectory, at most."""
    num_updates: int = Field(ge=2)
    """One update: ``groups_per_iteration`` groups of every family are played, then trained on."""
    num_threads: int = Field(ge=1)
    """Torch threads of the one process."""
    seed: int = 0
    continuous_batching: bool = False
    """TRL only: generate with transformers' continuous batching instead of ``generate``."""
    num_evaluation_episodes: int = Field(64, ge=1)
    """Held-out episodes of each family, where a policy is evaluated."""

    @model_validator(mode="after")
    def _one_group_size(self) -> PeerSpec:
        sizes = {name: family.group_size for name, family in self.families.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"group sizes are {sizes}; TRL knows one num_generations, so they must be equal")
        if self.trajectories_per_update % self.training.minibatches:
            raise ValueError(
                f"training.minibatches is {self.training.minibatches}; it must divide the "
                f"{self.trajectories_per_update} trajectories of an update, because TRL's minibatches have one size"
            )
        return self

    @property
    def group_size(self) -> int:
        return next(iter(self.families.values())).group_size

    @property
    def groups_per_update(self) -> int:
        return sum(family.groups_per_iteration for family in self.families.values())

    @property
    def trajectories_per_update(self) -> int:
        return self.groups_per_update * self.group_size

    def groups(self, update: int) -> list[tuple[str, int]]:
        """(family, environment seed) of every group of one update: the train episodes of a run with this seed."""
        return [
            (name, episode_seed(self.seed, name, update * family.groups_per_iteration + group, "train"))
            for name, family in self.families.items()
            for group in range(family.groups_per_iteration)
        ]


class Played(Protocol):
    """What a record needs to know of a finished episode."""

    @property
    def family(self) -> str: ...

    @property
    def success(self) -> bool: ...


class UpdateRecord(BaseModel):
    """One finished update."""

    model_config = ConfigDict(extra="forbid")

    ended_at_s: float
    """Seconds on the side's own clock when the update's last optimizer step was done (published, where that exists)."""
    num_trajectories: int
    num_sampled_tokens: int
    success: dict[str, float]
    """Share of solved episodes by family, as played during training."""


class PeerResult(BaseModel):
    """What a side measured."""

    model_config = ConfigDict(extra="forbid")

    updates: list[UpdateRecord]
    model_directory: str
    """The policy after the last update."""
    phases_s: dict[str, float] = {}
    """Seconds by phase over all updates, where the side can tell them apart."""
    held_out_success: dict[str, float] = {}
    """By family, where a policy was evaluated."""

    def trajectories_per_s(self) -> float:
        """Steady rate: trajectories trained between the end of the first update and the end of the last.

        The first update is left out: it pays for warming up (allocator, caches, first batch with nothing beside it).
        Raises ValueError with fewer than two updates.
        """
        return self._rate("num_trajectories")

    def tokens_per_s(self) -> float:
        """As `trajectories_per_s`, in sampled tokens."""
        return self._rate("num_sampled_tokens")

    def training_success(self, last: int) -> float:
        """Mean over families and over the ``last`` updates of the success while training."""
        shares = [share for record in self.updates[-last:] for share in record.success.values()]
        return sum(shares) / len(shares)

    def _rate(self, count: str) -> float:
        if len(self.updates) < 2:
            raise ValueError(f"{len(self.updates)} updates were recorded; a rate needs at least two")
        seconds = self.updates[-1].ended_at_s - self.updates[0].ended_at_s
        return sum(getattr(record, count) for record in self.updates[1:]) / seconds


def summarise(outcomes: Sequence[Played], ended_at_s: float, num_sampled_tokens: int) -> UpdateRecord:
    """One update's record from the outcomes of its episodes."""
    by_family: dict[str, list[bool]] = {}
    for outcome in outcomes:
        by_family.setdefault(outcome.family, []).append(outcome.success)
    return UpdateRecord(
        ended_at_s=ended_at_s,
        num_trajectories=len(outcomes),
        num_sampled_tokens=num_sampled_tokens,
        success={name: sum(solved) / len(solved) for name, solved in by_family.items()},
    )


def read_spec(path: str | Path) -> PeerSpec:
    return PeerSpec.model_validate_json(Path(path).read_text())
