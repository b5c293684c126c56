"""From an engine to the learner: every sampled token is trained once, with its log-probability as it was sampled,
whatever the chat template makes of the history."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from resources.engines.base import GenerateRequest, Generation
from resources.engines.config import EngineConfig
from resources.engines.local import LocalEngine
from resources.environments.base import Message, StepOutcome
from resources.environments.family import FamilyConfig
from resources.policy.chat_format import ChatFormat
from resources.policy.config import PolicyConfig
from resources.policy.tiny import create_tiny_policy
from resources.rollout.cross_policy import CrossPolicyConfig
from resources.rollout.encoding_cache import EncodingCache
from resources.rollout.env_manager import EnvManager
from resources.rollout.episode_services import EpisodeServices
from resources.rollout.messages import Assignment, Batch, BatchGroup, BatchMember
from resources.trajectories.arrow_files import decode_arrow, encode_arrow
from resources.trajectories.schema import from_table, to_table
from resources.trajectories.trajectory import Trajectory, TrajectoryRef
from tasks.training.advantages.base import AdvantageInputs
from tasks.training.algorithms import Algorithms
from tasks.training.config import AdvantageConfig, TrainingConfig
from tasks.training.learner import Learner
from tasks.training.row import TrainingRow
from tasks.training.rows import training_rows
from tasks.training.token_reads import read_sampled_tokens
from tests.model_directories import PublishedVersions

NUM_TURNS = 4
TEMPERATURE = 0.7
EXACT = 5e-6
"""Nats that float32 may differ by between the engine's forward pass, with its cache, and the learner's, packed."""
CUT_AT = 95
"""Tokens of a context that ends within the third turn."""
NEW = 3
"""Version of the current engine where turns cross policies; the stale one holds 0."""
FORGETFUL = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] if message['role'] != 'assistant' or loop.last else message['content'].split('e')[-1] }}"
    "<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Keeps of earlier turns what stands behind an "e", as templates do that drop what stands before ``</think>``."""


class TalkingEnvironment:
    env_version, max_turns = "1", NUM_TURNS

    def __init__(self) -> None:
        self.turn = 0

    async def reset(self, seed: int) -> list[Message]:
        return [Message(role="user", content="Go left or right.")]

    async def step(self, action: str) -> StepOutcome:
        self.turn += 1
        done = self.turn == NUM_TURNS
        return StepOutcome([Message(role="user", content=f"You are at {self.turn}.")], reward=1.0, terminated=done)

    async def close(self) -> None:
        return None

    def judgement(self) -> None:
        return None


class RecordingEngine:
    """The local engines, current and stale, with everything that was asked of them and answered kept."""

    def __init__(self, **engines: LocalEngine) -> None:
        self.engines = engines
        self.exchanges: list[tuple[GenerateRequest, Generation]] = []

    async def generate(self, request: GenerateRequest, hardware_class: str) -> Generation:
        answer = await self.engines[request.policy].generate(request)
        self.exchanges.append((request, answer))
        return answer

    def release(self, trajectory_id: str) -> None:
        return None

    def engine_of(self, trajectory_id: str) -> str:
        return "e"


@dataclass
class Played:
    directory: Path
    """Of the learner's version."""
    directories: dict[int, Path]
    """By version that sampled."""
    trajectories: list[Trajectory]
    exchanges: dict[str, list[tuple[GenerateRequest, Generation]]]
    rows: list[TrainingRow]
    unsplit: list[TrainingRow]
    """The same trajectories as one row each, whatever was rewritten."""

    def rows_of(self, trajectory: Trajectory) -> list[TrainingRow]:
        return [row for row in self.rows if row.rollout_id == trajectory.rollout_id]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = ["Go left or right. You are at 3."] * 10
    sizes = PolicyConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=16)
    return create_tiny_policy(tmp_path_factory.mktemp("policy"), sizes, corpus, seed=0)


@pytest.fixture(scope="module", params=["template", "append", "template, crossing", "append, crossing", "append, cut"])
def played(request: pytest.FixtureRequest, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """``crossing``: turns of either of two policies. ``cut``: the context ends within the third turn."""
    history, _, how = request.param.partition(", ")
    folder = tmp_path_factory.mktemp(history)
    directories = {0: folder / "policy"}
    shutil.copytree(policy, directories[0])
    (directories[0] / "chat_template.jinja").write_text(FORGETFUL)
    if how == "crossing":
        directories[NEW] = folder / "later"
        shutil.copytree(directories[0], directories[NEW])
        save_file(PublishedVersions(directories[0]).fetch(NEW), directories[NEW] / "model.safetensors")
    return asyncio.run(play(directories, history, context_length=CUT_AT if how == "cut" else 512))


async def play(directories: dict[int, Path], history: str, context_length: int = 512) -> Played:
    version = max(directories)
    kinds = {"current": version} | ({"stale": 0} if version else {})
    engines = {
        kind: LocalEngine(kind, "compute", PublishedVersions(directories[0]), held, EngineConfig(num_slots=2))
        for kind, held in kinds.items()
    }
    directory, recorded = directories[version], RecordingEngine(**engines)
    services = EpisodeServices(
        chat=EncodingCache(ChatFormat.from_directory(directory)),
        proxy=recorded,
        make_environment=lambda name, config: TalkingEnvironment(),
        context_length=context_length,
        length_finish="step",
        history=history,
        cross_policy=CrossPolicyConfig(p_stale=0.5, refresh_every=NEW + 1) if version else None,
    )
    family = FamilyConfig(environment="talk", hardware_class="compute", max_new_tokens=24, temperature=TEMPERATURE)
    assignments = [Assignment("run", "talk", "talk-000000", member, 0, 2, 5, 70 + member) for member in range(2)]
    trajectories = [await EnvManager(each, family, services).play() for each in assignments]
    await asyncio.wait(services.closing)
    for engine in engines.values():
        await engine.close()
    stored = from_table(decode_arrow(encode_arrow(to_table(trajectories))))
    members = [
        BatchMember(t.trajectory_id, TrajectoryRef("f", place), float(place), True, "environment", "1", 0)
        for place, t in enumerate(stored)
    ]
    batch = Batch("run", version, (BatchGroup("talk-000000", "talk", 5, tuple(members)),))
    exchanges = {
        t.trajectory_id: [each for each in recorded.exchanges if each[0].trajectory_id == t.trajectory_id]
        for t in stored
    }
    unsplit = training_rows(batch, [replace(t, sequence_starts=[]) for t in stored])
    return Played(directory, directories, stored, exchanges, training_rows(batch, stored), unsplit)


def test_a_rewritten_history_begins_a_row_and_an_appended_one_does_not(played: Played) -> None:
    rewrites = played.directory.parent.name.startswith("template")
    assert (len(played.rows) > len(played.trajectories)) == rewrites
    for trajectory in played.trajectories:
        rows = played.rows_of(trajectory)
        assert len(rows) == len(trajectory.sequences)
        assert sum(len(row.turns) for row in rows) == len(trajectory.turns)
        assert len(trajectory.turns) == (3 if trajectory.truncated else NUM_TURNS)
        assert trajectory.truncated == (len(trajectory.token_ids) == CUT_AT)


def test_every_sampled_token_is_trained_once_with_the_logprob_of_the_engine(played: Played) -> None:
    for trajectory in played.trajectories:
        rows = played.rows_of(trajectory)
        answers = [answer for _, answer in played.exchanges[trajectory.trajectory_id]]
        for name, sampled in (
            ("token_ids", [answer.token_ids for answer in answers]),
            ("behaviour_logprobs", [answer.logprobs for answer in answers]),
            ("token_versions", [answer.versions for answer in answers]),
        ):
            trained = np.concatenate([getattr(row, name)[row.loss_mask] for row in rows])
            np.testing.assert_array_equal(trained, np.concatenate(sampled), err_msg=name)


def test_a_row_is_what_the_engine_read_before_each_of_its_actions(played: Played) -> None:
    """The prefix check: what is trained stands after exactly the tokens that it was sampled after."""
    for trajectory in played.trajectories:
        requests = iter([request for request, _ in played.exchanges[trajectory.trajectory_id]])
        for row in played.rows_of(trajectory):
            for turn in row.turns:
                np.testing.assert_array_equal(next(requests).token_ids, row.token_ids[: turn.action_start])
        assert next(requests, None) is None


def test_the_learner_computes_the_logprobs_that_the_engine_gave(played: Played) -> None:
    """Of each token, under the version that it names, whatever engines took the turns before it."""
    for version, directory in played.directories.items():
        learner = Learner(directory, TrainingConfig(), seed=0)
        read = read_sampled_tokens(
            played.rows, lambda batch, of=learner: of._forward.logprobs(batch)[0], learner.config, learner.device
        )
        for row, logprobs in zip(played.rows, read, strict=True):
            assert row.temperature == TEMPERATURE
            own = row.loss_mask & (row.token_versions == version)
            np.testing.assert_allclose(logprobs[own], row.behaviour_logprobs[own], atol=EXACT)


def test_a_rollout_counts_once_however_many_rows_it_has(played: Played) -> None:
    """M14. Rewards 0 and 1: the baseline is 0.5 in either mode."""
    estimate = Algorithms(TrainingConfig()).estimate(AdvantageInputs.of(played.rows))
    by_rollout = {row.rollout_id: set() for row in played.rows}
    for row, values in zip(played.rows, estimate.values_RT, strict=True):
        by_rollout[row.rollout_id].update(np.round(values, 2).tolist())
    assert [list(values) for values in by_rollout.values()] == [[-1.0], [1.0]]
    assert estimate.num_rollouts == 2


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "turn_returns"])
def test_the_advantage_of_a_turn_does_not_depend_on_the_rows_it_lies_in(played: Played, estimator: str) -> None:
    discount = 0.9 if estimator == "turn_returns" else 1.0
    algorithms = Algorithms(TrainingConfig(advantage=AdvantageConfig(estimator=estimator, discount=discount)))

    def of_turns(rows: list[TrainingRow]) -> list[float]:
        values_RT = algorithms.estimate(AdvantageInputs.of(rows)).values_RT
        return [
            float(values[turn.action_start]) for row, values in zip(rows, values_RT, strict=True) for turn in row.turns
        ]

    by_turn = of_turns(played.rows)
    assert len(by_turn) == sum(len(t.turns) for t in played.trajectories) and any(by_turn)
    assert by_turn == pytest.approx(of_turns(played.unsplit), rel=1e-5)


def test_an_update_trains_every_sampled_token_once(played: Played) -> None:
    learner = Learner(played.directory, TrainingConfig(minibatches=1), seed=0)
    learner.version = version = max(played.directories)
    metrics = learner.update(played.rows, version).metrics
    versions = np.concatenate([t.token_versions[t.loss_mask] for t in played.trajectories])
    assert metrics["tokens/trained"] == len(versions) > 0
    assert metrics["engine_difference/num_tokens"] == (versions == version).sum() > 0
    assert metrics["engine_difference/max"] < EXACT
    assert metrics["policy_drift/num_tokens"] == (versions < version).sum()
    if version:
        assert metrics["policy_drift/mean"] > 0.01, "the two policies can be told apart"
        assert metrics["staleness/max"] == NEW


def test_sequences_of_a_trajectory_draw_their_own_noise(played: Played) -> None:
    for trajectory in played.trajectories:
        seeds = {request.seed for request, _ in played.exchanges[trajectory.trajectory_id]}
        assert len(seeds) == len(trajectory.sequences)
        assert all(0 <= seed < 2**62 for seed in seeds)
