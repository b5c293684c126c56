"""An adapter from the learner through the store to the engine: what is sampled under it is what the learner computes,
and what PEFT computes with the published directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from resources.engines.base import GenerateRequest, Generation, SamplingParams
from resources.engines.config import EngineConfig
from resources.engines.local import LocalEngine
from resources.failures import EngineFailure
from resources.object_store import ObjectStore
from resources.policy.directory import weights_digest
from resources.runs import RunRef, checkpoint_prefix
from resources.weights.store import WeightStore
from tasks.training.config import LoraConfig
from tasks.training.learner import Learner
from tasks.training.rank import LearnerRank, LearnerSettings
from tasks.training.row import TrainingRow
from tasks.training.token_reads import read_sampled_tokens
from tests.unit.test_tasks_training_learner import OPTIMIZER, make_batch
from tests.unit.test_tasks_training_model import make_model_directory

LORA = LoraConfig(rank=4, alpha=8)
NUM_VERSIONS = 4
PROMPT = np.arange(4, 14, dtype=np.int32)
TEMPERATURE = 0.9


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


def learner_rank(directory: Path, store: ObjectStore, lora: LoraConfig, version: int | None = None) -> LearnerRank:
    run = RunRef(run_id="run", store_url=store.url).model_dump()
    config = {"optimizer": OPTIMIZER, "minibatches": 2, "lora": lora}
    return LearnerRank(LearnerSettings(run, config, str(directory), 0, 10, 2, 1), None, version)


def publish(rank: LearnerRank, version: int) -> dict[str, float]:
    return rank.write_version(version) | rank.write_checkpoint(version)


def train_and_publish(rank: LearnerRank, versions: range) -> list[dict[str, float]]:
    reports = []
    for version in versions:
        if version:
            rank.learner.update(make_batch(version - 1), version - 1)
        reports.append(publish(rank, version))
    return reports


@pytest.fixture(scope="module")
def published(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[LearnerRank, list[dict[str, float]]]:
    """Versions 0 to 3 of a LoRA run, and what each publication reported."""
    rank = learner_rank(directory, ObjectStore.open(tmp_path_factory.mktemp("store")), LORA)
    return rank, train_and_publish(rank, range(NUM_VERSIONS))


def peft_logprobs(base: Path, adapter: Path, token_ids: list[int]) -> np.ndarray:
    """[T - 1] log-probability of each token but the first, by transformers and PEFT alone."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / TEMPERATURE, -1)
    return logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1).numpy()


def learner_logprobs(rank: LearnerRank, token_ids: list[int]) -> np.ndarray:
    row = make_batch(0)[0]
    length = len(token_ids)
    mask = np.arange(length) > 0
    row = TrainingRow(
        **{name: getattr(row, name) for name in row.__dataclass_fields__}
        | {
            "token_ids": np.array(token_ids, dtype=np.int32),
            "loss_mask": mask,
            "behaviour_logprobs": np.zeros(length, dtype=np.float32),
            "token_versions": np.where(mask, 0, -1).astype(np.int32),
            "temperature": TEMPERATURE,
        }
    )
    learner = rank.learner
    assert isinstance(learner, Learner)
    (values,) = read_sampled_tokens(
        [row], lambda batch: learner._forward.logprobs(batch)[0], learner.config, learner.device
    )
    return values[mask]


async def sample(engine: LocalEngine, name: str) -> Generation:
    sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=12)
    return await engine.generate(GenerateRequest(name, name, PROMPT, sampling, seed=1))


def on_engine(store: ObjectStore, version: int, play: Callable[[LocalEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        weights = WeightStore(store, "run")
        engine = await asyncio.to_thread(LocalEngine, "e", "compute", weights, version, EngineConfig(num_slots=4))
        try:
            async with asyncio.timeout(60.0):
                await play(engine)
        finally:
            await engine.close()

    asyncio.run(run())


# PEFT 0.21 asks transformers by a deprecated name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_an_engine_samples_is_what_peft_computes(published, directory: Path) -> None:
    """Over several versions, loaded beside running requests: prefetch, suspend, load, resume."""
    rank, reports = published
    store, weights = rank.run.root(), rank.weights
    drawn: dict[int, Generation] = {}

    async def play(engine: LocalEngine) -> None:
        for version in range(NUM_VERSIONS):
            if version:
                await engine.prefetch(version)
                await engine.suspend()
                report = await engine.load(version)
                await engine.resume()
                assert (report.version, report.num_bytes) == (version, reports[version]["num_bytes"])
            drawn[version] = await sample(engine, f"r{version}")

    on_engine(store, 0, play)
    for version, generation in drawn.items():
        assert generation.versions.tolist() == [version] * 12
        token_ids = [*PROMPT.tolist(), *generation.token_ids.tolist()]
        expected = peft_logprobs(weights.policy_directory(version), weights.directory(version), token_ids)[-12:]
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
        np.testing.assert_allclose(peft_logprobs(directory, weights.directory(version), token_ids)[-12:], expected)
    newest = drawn[NUM_VERSIONS - 1]
    token_ids = [*PROMPT.tolist(), *newest.token_ids.tolist()]
    np.testing.assert_allclose(newest.logprobs, learner_logprobs(rank, token_ids)[-12:], atol=1e-4)
    assert np.abs(peft_logprobs(directory, weights.directory(0), token_ids)[-12:] - newest.logprobs).max() > 0.1, (
        "the policy has moved far from its base"
    )


def test_the_base_is_kept_beside_the_versions_and_named_by_each(published, directory: Path) -> None:
    rank, reports = published
    weights = rank.weights
    base = weights.policy_directory(0)
    config = json.loads((weights.directory(2) / "adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    adapters = [weights.manifest(version).adapter for version in range(NUM_VERSIONS)]
    assert all(adapter == rank.learner.adapter for adapter in adapters)
    assert weights_digest(base) == weights_digest(directory) == rank.learner.base
    whole = AutoModelForCausalLM.from_pretrained(base)
    assert reports[1]["num_bytes"] < sum(p.numel() * p.element_size() for p in whole.parameters())


def test_merged_versions_hold_the_same_policy(published, directory: Path, tmp_path: Path) -> None:
    """``publish: merged``: a directory that loads without PEFT, its matrices those that engines make of the adapter."""
    rank, _ = published
    merged = learner_rank(directory, ObjectStore.open(tmp_path), LORA.model_copy(update={"publish": "merged"}))
    train_and_publish(merged, range(3))
    expected: Mapping[str, torch.Tensor] = rank.weights.fetch(2)
    found = merged.weights.fetch(2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    AutoModelForCausalLM.from_pretrained(merged.weights.directory(2))


def test_a_learner_goes_on_from_its_checkpoint_beside_the_same_base(published, directory: Path, tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path / "store")
    first = learner_rank(directory, store, LORA)
    train_and_publish(first, range(3))
    resumed = learner_rank(directory, store, LORA, version=2)
    manifest = resumed.weights.manifest(2)
    publish(resumed, 2)
    assert resumed.weights.manifest(2) == manifest, "the same version again"
    resumed.learner.update(make_batch(2), 2)
    publish(resumed, 3)
    assert published[0].weights.manifest(3).tensors == resumed.weights.manifest(3).tensors
    digests = {each.weights.manifest(3).files["adapter_model.safetensors"].sha256 for each in (published[0], resumed)}
    assert len(digests) == 1, "bitwise what a run that was never interrupted publishes"
    other = make_model_directory(tmp_path / "other", tied=False)
    with pytest.raises(ValueError, match="is an adapter of the base"):
        learner_rank(other, store, LORA, version=2)
    with pytest.raises(ValueError, match="run 'run' are adapters of the base"):
        learner_rank(other, store, LORA).write_version(0)
    assert store.exists(f"runs/run/{checkpoint_prefix(2)}/state.json")


def test_an_engine_keeps_what_it_has_when_a_version_cannot_be_loaded(directory: Path, tmp_path: Path) -> None:
    """A version that is not there, a damaged adapter, an adapter of another base."""
    store = ObjectStore.open(tmp_path)
    train_and_publish(learner_rank(directory, store, LORA), range(4))
    damaged = "runs/run/weights/v000002/adapter_model.safetensors"
    store.put(damaged, store.get(damaged)[:-4] + b"\0\0\0\1")
    manifest = "runs/run/weights/v000003/manifest.json"
    strange = store.get_json(manifest)
    strange["adapter"]["base_digest"] = "ab" * 32
    store.put_json(manifest, strange)

    async def play(engine: LocalEngine) -> None:
        before = await sample(engine, "before")
        for version, error in (
            (9, r"version 9 cannot be fetched.*it holds \[0, 1, 2, 3\]"),
            (2, "version 2 cannot be fetched.*adapter_model.safetensors has .* its manifest says"),
            (3, "version 3 cannot be fetched.*an adapter of the base abababababababab.*means nothing"),
        ):
            with pytest.raises(EngineFailure, match=error):
                await engine.prefetch(version)
            await engine.suspend()
            with pytest.raises(EngineFailure, match=error):
                await engine.load(version)
            await engine.resume()
        after = await sample(engine, "after")
        assert after.versions.tolist() == [1] * 12
        np.testing.assert_array_equal(after.logprobs, before.logprobs)

    on_engine(store, 1, play)
