"""Bit by bit the same, whoever the neighbours are: the invariant pass, its sampling, and the engine on top."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from resources.engines.base import GenerateRequest, SamplingParams
from resources.engines.config import EngineConfig
from resources.engines.local import LocalEngine
from resources.engines.local_forward import LocalForward, Piece
from resources.engines.local_invariant import (
    ROWS,
    InvariantForward,
    check_invariance,
    sample_tokens_in_blocks,
)
from resources.engines.local_layout import read_layout
from resources.engines.local_sampling import sample_tokens
from resources.engines.local_weights import fuse_weights
from resources.policy.config import PolicyConfig
from resources.policy.tiny import create_tiny_policy
from tests.model_directories import LAYOUTS, VOCAB_SIZE, PublishedVersions, write_model

NOTHING = np.empty(0, dtype=np.int64)


@pytest.fixture(scope="module")
def quickstart_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's sizes: with much smaller ones the ordinary pass happens to be invariant too."""
    return create_tiny_policy(tmp_path_factory.mktemp("policy"), PolicyConfig(), ["guess 0123456789 +-*=<>/"], seed=0)


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_it_computes_what_the_ordinary_pass_computes(layout_name: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path, layout_name)
    layout = read_layout(directory)
    weights = fuse_weights(layout, PublishedVersions(directory).fetch(0), version=0)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, (4, 100))
    passes = [cls(layout, num_slots=4, context_length=120) for cls in (LocalForward, InvariantForward)]
    with torch.inference_mode():
        pieces = [Piece(0, 0, 70, True), Piece(2, 0, 3, True), Piece(3, 0, 40, False)]
        packed = np.concatenate([tokens[p.slot, p.start : p.end] for p in pieces])
        ordinary, invariant = (each.logits(weights, packed, NOTHING, NOTHING, pieces) for each in passes)
        assert ordinary.shape == invariant.shape == (2, VOCAB_SIZE)
        torch.testing.assert_close(invariant, ordinary, atol=1e-4, rtol=0)
        singles, positions, pieces = np.array([0, 2]), np.array([70, 3]), [Piece(3, 40, 60, True)]
        packed = np.concatenate([tokens[singles, positions], tokens[3, 40:60]])
        ordinary, invariant = (each.logits(weights, packed, singles, positions, pieces) for each in passes)
        torch.testing.assert_close(invariant, ordinary, atol=1e-4, rtol=0)
        nothing = invariant.new_empty(0, VOCAB_SIZE)
        uncompleted = [Piece(1, 0, 5, False)]
        assert torch.equal(passes[1].logits(weights, tokens[1, :5].copy(), NOTHING, NOTHING, uncompleted), nothing)


def test_the_check_passes_here_and_catches_a_pass_that_is_not_invariant(quickstart_policy: Path) -> None:
    """The second half is the negative control: the ordinary pass, by the same measure, differs."""
    layout = read_layout(quickstart_policy)
    weights = fuse_weights(layout, PublishedVersions(quickstart_policy).fetch(0), version=0)
    check_invariance(InvariantForward(layout, 8, 128), weights)
    with pytest.raises(ValueError, match="depend on its neighbours in a batch"):
        check_invariance(LocalForward(layout, 8, 128), weights)


def test_a_row_is_sampled_alike_at_every_place_of_a_batch() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(1, 61)).astype(np.float32))
    temperature, noise, greedy = np.array([0.7]), np.array([0.4]), np.array([False])
    alone = sample_tokens_in_blocks(logits.clone(), temperature, noise, greedy)
    expected = sample_tokens(logits.clone(), temperature, noise, greedy)
    assert alone[0] == expected[0] and alone[1] == pytest.approx(expected[1], abs=1e-6)
    for size in (2, ROWS, ROWS + 9):
        others = torch.from_numpy(rng.normal(size=(size, 61)).astype(np.float32))
        for place in range(size):
            batch = others.clone()
            batch[place] = logits[0]
            ids, logprobs = sample_tokens_in_blocks(
                batch, np.full(size, 0.7), np.full(size, 0.4), np.zeros(size, dtype=bool)
            )
            assert ids[place] == alone[0][0] and logprobs[place].tobytes() == alone[1][0].tobytes()


def generate_all(policy: Path, waves: list[list[int]], **config) -> dict[int, tuple[bytes, bytes]]:
    """Three turns of each numbered trajectory; those of a wave run together. Tokens and logprobs, as bytes."""
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 200, 24)
    prompts = {n: np.concatenate([shared, rng.integers(0, 200, 5 + 3 * n)]).astype(np.int32) for n in range(12)}

    async def play(engine: LocalEngine, number: int) -> tuple[bytes, bytes]:
        history, logprobs = prompts[number], []
        for turn in range(3):
            sampling = SamplingParams(max_new_tokens=4 + number % 5)
            request = GenerateRequest(f"{number}:{turn}", f"t{number}", history, sampling, seed=number)
            generation = await engine.generate(request)
            logprobs.append(generation.logprobs)
            history = np.concatenate([history, generation.token_ids, prompts[number][: 3 + turn]])
        return history.tobytes(), np.concatenate(logprobs).tobytes()

    async def main() -> dict[int, tuple[bytes, bytes]]:
        engine = LocalEngine("e", "compute", PublishedVersions(policy), 0, EngineConfig(**config))
        try:
            found = {}
            for wave in waves:
                found |= dict(zip(wave, await asyncio.gather(*(play(engine, n) for n in wave)), strict=True))
            return found
        finally:
            await engine.close()

    return asyncio.run(main())


def test_an_engine_answers_the_same_alone_and_in_company(quickstart_policy: Path) -> None:
    """One at a time, all at once on few slots, with and without a prefix cache, in small pieces: equal bits. By default
    they differ."""
    alone, together = [[n] for n in range(12)], [list(range(12))[::-1]]
    expected = generate_all(quickstart_policy, alone, batch_invariant=True, num_slots=8)
    for config in (dict(prefix_cache="shared"), dict(prefix_cache="off", max_prefill_tokens_per_step=16)):
        assert generate_all(quickstart_policy, together, batch_invariant=True, num_slots=4, **config) == expected
    ordinary = generate_all(quickstart_policy, alone, num_slots=8)
    assert generate_all(quickstart_policy, together, num_slots=4) != ordinary
