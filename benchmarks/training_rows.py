"""The rows of `benchmarks.training`: one batch of the quickstart's shape, played by its noisy scripted experts.

Experts need no policy, so the same seed gives the same rows everywhere; their episodes are as long as those of a policy
that still errs. Log-probabilities are the policy's own, as an engine would have reported them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flows.config import RunConfig
from resources.environments.family import FamilyConfig
from resources.environments.seeds import episode_seed
from resources.environments.transcripts import Transcript, noisy_expert_episode
from resources.policy.chat_format import ChatFormat
from resources.policy.tiny import create_tiny_policy
from tasks.training.advantages.base import AdvantageInputs
from tasks.training.algorithms import Algorithms
from tasks.training.config import TrainingConfig
from tasks.training.forward import PolicyForward
from tasks.training.masks import derive_masks
from tasks.training.model import load_policy
from tasks.training.row import TrainingRow
from tasks.training.token_reads import read_sampled_tokens
from tasks.warm_start.config import WarmStartConfig
from tasks.warm_start.episodes import EpisodeEncoder, ExpertEpisodes


@dataclass(frozen=True)
class Workload:
    """A policy and one batch for it. Picklable: every process of the benchmark gets the same."""

    directory: str
    training: TrainingConfig
    rows: list[TrainingRow]
    live: list[int]
    """Rows with at least one trained token; the others never reach the model."""
    trained_RT: list[np.ndarray]
    advantages_RT: list[np.ndarray]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each live row."""
        return [len(self.rows[index].token_ids) for index in self.live]

    @property
    def num_trained(self) -> int:
        return sum(int(self.trained_RT[index].sum()) for index in self.live)


async def play_workload(config: RunConfig, folder: Path, seed: int = 0) -> Workload:
    """A tiny policy in ``folder`` whose tokenizer knows the families' text, and groups of every family for it."""
    families, noise = dict(config.families), config.warm_start or WarmStartConfig()
    corpus = await ExpertEpisodes(families, noise, seed).corpus()
    directory = create_tiny_policy(folder / "policy", config.policy, corpus, seed)
    encoder = EpisodeEncoder(ChatFormat.from_directory(directory), config.policy.context_length)
    groups = await play_groups(families, noise, seed)
    rows = [
        as_row(family, group, member, encoder, transcript)
        for (family, group), members in groups.items()
        for member, transcript in enumerate(members)
    ]
    rows = with_logprobs(rows, directory, config.training)
    return prepare(str(directory), config.training, rows)


async def play_groups(
    families: Mapping[str, FamilyConfig], noise: WarmStartConfig, seed: int
) -> dict[tuple[str, str], list[Transcript]]:
    """``groups_per_iteration`` groups of each family; siblings share their problem and differ in the expert's slips."""
    groups: dict[tuple[str, str], list[Transcript]] = {}
    for name, family in families.items():
        rng = random.Random(f"training rows {seed} {name}")
        for group in range(family.groups_per_iteration):
            problem = episode_seed(seed, name, group, "train")
            groups[name, f"{name}-{group}"] = [
                await noisy_expert_episode(family, problem, noise.noise_of(name), rng, family=name)
                for _ in range(family.group_size)
            ]
    return groups


def as_row(family: str, group: str, member: int, encoder: EpisodeEncoder, transcript: Transcript) -> TrainingRow:
    """Every action token is one that the policy would have sampled at version 0."""
    sequence = encoder.encode(transcript.messages)
    name = f"{group}/{member}"
    return TrainingRow(
        token_ids=sequence.token_ids.astype(np.int32),
        loss_mask=sequence.trained,
        behaviour_logprobs=np.zeros(len(sequence.token_ids), np.float32),
        token_versions=np.where(sequence.trained, 0, -1).astype(np.int32),
        temperature=1.0,
        reward=transcript.reward,
        family=family,
        group_id=group,
        rollout_id=name,
        trajectory_id=name,
    )


def with_logprobs(rows: Sequence[TrainingRow], directory: Path, training: TrainingConfig) -> list[TrainingRow]:
    """The rows with the log-probabilities of the policy in ``directory``."""
    forward = PolicyForward(load_policy(directory, training.layout, "cpu"), training.max_logits_per_chunk)
    read = read_sampled_tokens(rows, lambda batch: forward.logprobs(batch)[0], training, "cpu")
    return [replace(row, behaviour_logprobs=logprobs) for row, logprobs in zip(rows, read, strict=True)]


def prepare(directory: str, training: TrainingConfig, rows: list[TrainingRow]) -> Workload:
    """With the advantages and masks that the learner derives, for loops that know no groups."""
    inputs = AdvantageInputs.of(rows)
    advantages = Algorithms(training).estimate(inputs)
    masks = derive_masks(inputs, advantages.excluded_R, "train")
    live = [index for index, mask in enumerate(masks.trained_RT) if mask.any()]
    return Workload(directory, training, rows, live, masks.trained_RT, advantages.values_RT)
