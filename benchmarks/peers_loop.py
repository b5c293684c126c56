"""The bare loop of `benchmarks.peers`: engine, environments and learner in one process, one after the other.

``python -m benchmarks.peers_loop train SPEC.json RESULT.json``: play all groups of an update, train, load, repeat. No
store, no queue, no pool, no Prefect, no staleness: what it reaches on one core, times two, is the bound for the others.

``python -m benchmarks.peers_loop evaluate SPEC.json RESULT.json``: held-out success of a model directory; the same
episodes for every side's policy.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers_episode import Episode, Outcome
from benchmarks.peers_spec import PeerResult, PeerSpec, read_spec, summarise
from resources.engines.base import GenerateRequest, SamplingParams
from resources.engines.config import EngineConfig
from resources.environments.seeds import episode_seed, sampling_seed
from resources.policy.chat_format import ChatFormat
from resources.rewards.scorers import ResolvedScorer, resolve_scorer
from tasks.training.row import TrainingRow, TurnSpan

if TYPE_CHECKING:
    import torch

    from resources.engines.local import LocalEngine
    from tasks.training.learner import Learner


@dataclass(frozen=True)
class Seat:
    """One trajectory to play."""

    family: str
    group_id: str
    member: int
    seed_env: int


class Players:
    """Plays trajectories on one engine, all at once."""

    def __init__(self, spec: PeerSpec, engine: LocalEngine) -> None:
        self._spec, self._engine = spec, engine
        self._chat = ChatFormat.from_directory(spec.model_directory)
        self._scorers: dict[str, ResolvedScorer] = {
            name: resolve_scorer(family.scorer, family.scorer_arguments) for name, family in spec.families.items()
        }

    async def play_all(self, seats: Sequence[Seat]) -> list[tuple[TrainingRow, Outcome]]:
        return list(await asyncio.gather(*(self._play(seat) for seat in seats)))

    async def _play(self, seat: Seat) -> tuple[TrainingRow, Outcome]:
        family = self._spec.families[seat.family]
        episode = Episode(seat.family, family, self._scorers[seat.family])
        trajectory_id = f"{seat.group_id}/{seat.member}"
        tokens: list[np.ndarray] = []
        logprobs: list[np.ndarray] = []
        versions: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        spans: list[tuple[int, int, int]] = []

        def append(ids: np.ndarray, logprob: np.ndarray, version: np.ndarray, sampled: bool) -> None:
            tokens.append(ids)
            logprobs.append(logprob)
            versions.append(version)
            masks.append(np.full(len(ids), sampled))

        def observe(ids: np.ndarray) -> None:
            append(ids, np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32), False)

        seed = sampling_seed(self._spec.seed, seat.group_id, seat.member, 0)
        observe(self._chat.opening(await episode.start(seat.seed_env)))
        while not episode.over:
            history = np.concatenate(tokens)
            room = self._spec.context_length - len(history)
            if room <= 0:
                break
            sampling = SamplingParams(
                temperature=family.temperature,
                max_new_tokens=min(family.max_new_tokens, room),
                stop_token_ids=self._chat.stop_token_ids,
            )
            request_id = f"{trajectory_id}/{len(tokens)}"
            turn = await self._engine.generate(GenerateRequest(request_id, trajectory_id, history, sampling, seed))
            assert turn.error is None, turn.error
            append(turn.token_ids, turn.logprobs, turn.versions, True)
            spans.append((spans[-1][2] if spans else 0, len(history), len(history) + len(turn.token_ids)))
            observation = await episode.act(self._chat.decode_action(turn.token_ids))
            if not episode.over:
                observe(self._chat.continuation(observation, int(turn.token_ids[-1])))
        await self._engine.release(trajectory_id)
        loss_mask = np.concatenate(masks)
        outcome = await episode.outcome(int(loss_mask.sum()))
        row = TrainingRow(
            token_ids=np.concatenate(tokens).astype(np.int32),
            loss_mask=loss_mask,
            behaviour_logprobs=np.concatenate(logprobs).astype(np.float32),
            token_versions=np.concatenate(versions).astype(np.int32),
            temperature=family.temperature,
            reward=outcome.reward,
            family=seat.family,
            group_id=seat.group_id,
            rollout_id=trajectory_id,
            trajectory_id=trajectory_id,
            turns=tuple(TurnSpan(*span, reward) for span, reward in zip(spans, episode.turn_rewards, strict=True)),
            reward_components=outcome.components,
        )
        return row, outcome


class DirectoryWeights:
    """A model directory as the one version that an engine can load."""

    def __init__(self, model_directory: str) -> None:
        self._directory = Path(model_directory)

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self._directory / "model.safetensors")

    def num_bytes(self, version: int) -> int:
        return (self._directory / "model.safetensors").stat().st_size

    def policy_directory(self, version: int) -> Path:
        return self._directory


class LearnerWeights(DirectoryWeights):
    """What the learner of the same process holds, handed to the engine without a store."""

    def __init__(self, model_directory: str, learner: Learner) -> None:
        super().__init__(model_directory)
        self._learner = learner

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        assert version == self._learner.version, (version, self._learner.version)
        return self._learner.tensors()


async def train(spec: PeerSpec) -> PeerResult:
    """Synchronous RL: play, update, load; ``spec.num_updates`` times."""
    from safetensors.torch import save_file

    from resources.engines.local import LocalEngine
    from tasks.training.learner import Learner

    learner = Learner(
        spec.model_directory, spec.training, seed=spec.seed, threads=spec.num_threads, total_updates=spec.num_updates
    )
    config = EngineConfig(num_slots=spec.trajectories_per_update, context_length=spec.context_length)
    weights = LearnerWeights(spec.model_directory, learner)
    engine = LocalEngine("loop", "cpu", weights, 0, config, threads=spec.num_threads)
    players = Players(spec, engine)
    updates, phases = [], {"rollout": 0.0, "update": 0.0, "load": 0.0}
    for version in range(spec.num_updates):
        began = time.perf_counter()
        seats = [
            Seat(name, f"{name}-{version}-{group}", member, seed)
            for group, (name, seed) in enumerate(spec.groups(version))
            for member in range(spec.group_size)
        ]
        rows, outcomes = zip(*await players.play_all(seats), strict=True)
        played = time.perf_counter()
        learner.update(rows, version)
        updated = time.perf_counter()
        await engine.suspend()
        await engine.load(version + 1)
        await engine.resume()
        ended = time.perf_counter()
        for phase, seconds in zip(phases, (played - began, updated - played, ended - updated), strict=True):
            phases[phase] += seconds
        updates.append(summarise(outcomes, ended, sum(outcome.num_sampled_tokens for outcome in outcomes)))
    await engine.close()
    output = Path(spec.output_directory)
    output.mkdir(parents=True, exist_ok=True)
    for name, content in learner.files().items():
        (output / name).write_bytes(content)
    save_file(learner.tensors(), output / "model.safetensors", metadata={"format": "pt"})
    return PeerResult(updates=updates, model_directory=str(output), phases_s=phases)


async def evaluate(spec: PeerSpec, num_episodes: int) -> dict[str, float]:
    """Held-out success of ``spec.model_directory`` by family, ``num_episodes`` each, sampled as in training."""
    from resources.engines.local import LocalEngine

    config = EngineConfig(num_slots=spec.trajectories_per_update, context_length=spec.context_length)
    engine = LocalEngine(
        "evaluation", "cpu", DirectoryWeights(spec.model_directory), 0, config, threads=spec.num_threads
    )
    seats = [
        Seat(name, f"eval-{name}-{index}", 0, episode_seed(spec.seed, name, index, "eval"))
        for name in spec.families
        for index in range(num_episodes)
    ]
    played = await Players(spec, engine).play_all(seats)
    await engine.close()
    return summarise([outcome for _, outcome in played], 0.0, 0).success


def main(arguments: Sequence[str]) -> None:
    command, spec_path, result_path = arguments
    spec = read_spec(spec_path)
    if command == "train":
        result = asyncio.run(train(spec))
    else:
        success = asyncio.run(evaluate(spec, spec.num_evaluation_episodes))
        result = PeerResult(updates=[], model_directory=spec.model_directory, held_out_success=success)
    Path(result_path).write_text(result.model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1:])
