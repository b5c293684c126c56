"""From a policy configuration to a policy that plays a little: create (or load), clone noisy experts, publish."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from resources.environments.family import FamilyConfig
from resources.object_store import ObjectStore
from resources.policy.chat_format import ChatFormat
from resources.policy.config import PolicyConfig
from resources.policy.directory import policy_files
from resources.policy.tiny import create_tiny_policy
from tasks.training.model import load_policy, policy_tensors
from tasks.warm_start.artifact import publish_warm_start
from tasks.warm_start.cloning import BehaviourCloning
from tasks.warm_start.config import WarmStartConfig
from tasks.warm_start.digest import warm_start_digest
from tasks.warm_start.episodes import EpisodeEncoder, ExpertEpisodes

LAST_STEPS = 20
"""The reported loss is the mean over this many last steps."""

Progress = Callable[[int, int, float], None]
"""(steps done, steps in all, loss of the last one)."""


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    digest: str
    loss: float
    """Mean negative log-probability of an action token over the last steps, in nats."""
    data_success: dict[str, float]
    """Share of the noisy expert's episodes that solved their task, by family: what was cloned."""
    num_episodes: int
    num_tokens: int
    """Tokens that went through the model."""
    episodes_s: float
    """Seconds that the training waited for episodes, their encoding included."""
    seconds: float
    """All of it, in seconds."""


def train_warm_start(
    policy: PolicyConfig,
    families: Mapping[str, FamilyConfig],
    config: WarmStartConfig,
    seed: int,
    store: ObjectStore,
    progress: Progress | None = None,
    *,
    device: str = "cpu",
    threads: int = 1,
) -> WarmStartReport:
    """Train and publish under ``warm_starts/<digest>/``. The same settings and seed give the same episodes and weights.

    The episodes of the next step are played on a thread while the model trains on this one's: most of their time is
    waiting for the sandbox.

    Raises:
        ValueError: settings that cannot work, or an environment without a scripted expert.
        EnvironmentFailure, RewardFailure: an episode that could not be played or judged.
        FloatingPointError: the training diverged.
    """
    started = time.perf_counter()
    torch.set_num_threads(threads)
    digest = warm_start_digest(policy, families, config, seed)
    episodes = ExpertEpisodes(families, config, seed)
    with (
        tempfile.TemporaryDirectory(prefix="rollart-warm-start-") as temporary,
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="warm-start-episodes") as player,
        _loop_of(player) as loop,
    ):
        if policy.model_directory is None:
            corpus = player.submit(loop.run, episodes.corpus()).result()
            source = create_tiny_policy(Path(temporary) / "untrained", policy, corpus, seed)
        else:
            source = Path(policy.model_directory)
        encoder = EpisodeEncoder(ChatFormat.from_directory(source), policy.context_length)
        model = load_policy(source, "packed", device)
        cloning = BehaviourCloning(model, config, device)
        losses: list[float] = []
        solved: Counter[str] = Counter()
        played: Counter[str] = Counter()
        num_tokens = 0
        next_batch = player.submit(loop.run, episodes.step())
        episodes_s = time.perf_counter() - started
        for step in range(config.num_steps):
            step_started = time.perf_counter()
            batch = next_batch.result()
            if step + 1 < config.num_steps:
                next_batch = player.submit(loop.run, episodes.step())
            sequences = [encoder.encode(episode.transcript.messages) for episode in batch]
            episodes_s += time.perf_counter() - step_started
            played.update(episode.family for episode in batch)
            solved.update(episode.family for episode in batch if episode.transcript.success)
            num_tokens += sum(len(sequence.token_ids) for sequence in sequences)
            losses.append(cloning.step(sequences))
            if progress is not None:
                progress(step + 1, config.num_steps, losses[-1])
        trained = Path(temporary) / "trained"
        trained.mkdir()
        for name, data in policy_files(source).items():
            (trained / name).write_bytes(data)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in policy_tensors(model).items()}
        save_file(tensors, trained / "model.safetensors", metadata={"format": "pt"})
        last = losses[-LAST_STEPS:]
        report = WarmStartReport(
            digest=digest,
            loss=sum(last) / len(last),
            data_success={family: solved[family] / played[family] for family in played},
            num_episodes=sum(played.values()),
            num_tokens=num_tokens,
            episodes_s=episodes_s,
            seconds=time.perf_counter() - started,
        )
        publish_warm_start(store, digest, trained, asdict(report))
    return report


@contextmanager
def _loop_of(player: ThreadPoolExecutor) -> Iterator[asyncio.Runner]:
    """An event loop that lives on the player's one thread, and is closed there."""
    loop = asyncio.Runner()
    try:
        yield loop
    finally:
        player.submit(loop.close).result()
