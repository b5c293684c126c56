"""The engine actor over the real weight store: built from picklable arguments, moved from version to version."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from resources.engines.actor import EngineActor
from resources.engines.base import GenerateRequest, SamplingParams
from resources.engines.config import EngineConfig
from resources.engines.exchange import HostedEngine
from resources.failures import EngineFailure
from resources.object_store import ObjectStore
from resources.policy.config import PolicyConfig
from resources.policy.directory import policy_files
from resources.policy.tiny import create_tiny_policy
from resources.weights.store import WeightStore
from tests.model_directories import PublishedVersions, full_recompute


def test_versions_travel_from_the_store_to_the_tokens(tmp_path: Path) -> None:
    sizes = PolicyConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=16)
    directory = create_tiny_policy(tmp_path / "policy", sizes, ["go left", "go right"] * 10, seed=0)
    store_url = f"file://{tmp_path}/store"
    store = WeightStore(ObjectStore.open(store_url), "run-1")
    versions, files = PublishedVersions(directory), policy_files(directory)
    for version in (0, 1):
        store.publish(version, versions.fetch(version), files=files)
    arguments = (store_url, "run-1", 0, EngineConfig(num_slots=4), "compute", "compute-0", "cpu", 1)
    prompt = np.arange(10, 40, dtype=np.int32)

    async def scenario() -> None:
        actor = await asyncio.to_thread(EngineActor, *pickle.loads(pickle.dumps(arguments)))
        for version in (0, 1):
            request = GenerateRequest(f"r{version}", "t", prompt, SamplingParams(max_new_tokens=8), seed=version)
            (generation,) = pickle.loads(pickle.dumps(await actor.exchange("p", [request], [], [], 20.0))).finished
            assert generation.versions.tolist() == [version] * 8
            tokens = [*prompt.tolist(), *generation.token_ids.tolist()]
            logprobs = full_recompute(store.directory(version), None, tokens)
            expected = [float(logprobs[i - 1, tokens[i]]) for i in range(30, 38)]
            np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
            if version == 0:
                await actor.prefetch(1)
                await actor.suspend()
                with pytest.raises(EngineFailure, match=r"version 9 cannot be fetched.*it holds \[0, 1\]"):
                    await actor.load(9)
                assert (await actor.load(1)).num_bytes == store.manifest(1).num_bytes
                await actor.resume()
        stats = await actor.stats()
        assert (stats.engine, stats.hardware_class, stats.version) == ("compute-0", "compute", 1)
        await actor.close()

    asyncio.run(scenario())


def test_a_context_or_cache_that_cannot_be_is_refused(tmp_path: Path) -> None:
    from resources.engines.local import LocalEngine

    sizes = PolicyConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, context_length=64)
    versions = PublishedVersions(create_tiny_policy(tmp_path, sizes, ["go left"] * 10, seed=0))
    with pytest.raises(ValueError, match=r"engine\.context_length is 128, the model was built for 64"):
        LocalEngine("e", "compute", versions, 0, EngineConfig(context_length=128))
    huge = create_tiny_policy(
        tmp_path / "huge", sizes.model_copy(update={"context_length": 2**36}), ["go left"] * 10, seed=0
    )
    with pytest.raises(ValueError, match=r"their KV cache needs .* GiB, cpu has .* GiB; lower one of them"):
        LocalEngine("e", "compute", PublishedVersions(huge), 0, EngineConfig(num_slots=4096))


class CountsItsClosing:
    """An engine as far as its end goes."""

    name = "e"

    def __init__(self) -> None:
        self.num_closed, self.closed = 0, threading.Event()

    async def close(self) -> None:
        self.num_closed += 1
        self.closed.set()


def test_an_engine_whose_actor_is_dropped_is_closed() -> None:
    """A driver that is killed closes nothing; Dask drops its actors, and no thread may stay behind."""
    dropped, closed = CountsItsClosing(), CountsItsClosing()
    actor = EngineActor.around(cast(HostedEngine, dropped))
    del actor
    gc.collect()
    assert dropped.closed.wait(20)
    actor = EngineActor.around(cast(HostedEngine, closed))
    asyncio.run(actor.close())
    del actor
    gc.collect()
    assert closed.num_closed == 1
