"""Sampling: noise is a function of (seed, position), log-probabilities are those after temperature."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from resources.engines.base import SamplingParams
from resources.engines.config import check_sampling
from resources.engines.local_sampling import sample_tokens
from resources.engines.noise import uniform_at, uniform_noise


def sample(logits: list[list[float]], temperature: float, noise: list[float], greedy: bool = False):
    rows = len(logits)
    return sample_tokens(
        torch.tensor(logits, dtype=torch.float32),
        np.full(rows, temperature),
        np.array(noise, dtype=np.float64),
        np.full(rows, greedy),
    )


def test_logprobs_are_after_temperature() -> None:
    """M10: logits [2, 1, 0], temperature 0.5, token 0 -> -0.1429, not -0.8152."""
    token_ids, logprobs = sample([[2.0, 1.0, 0.0]], 0.5, [0.0])
    assert token_ids.tolist() == [0]
    assert logprobs[0] == pytest.approx(-0.1429, abs=1e-4)
    assert logprobs.dtype == np.float32


def test_greedy_takes_the_likeliest_token_whatever_the_noise() -> None:
    token_ids, logprobs = sample([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]], 1.0, [0.999, 0.999], greedy=True)
    assert token_ids.tolist() == [1, 0]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(torch.tensor([0.0, 3.0, 1.0]), 0)[1]))


def test_inverse_cdf_follows_the_order_of_the_vocabulary() -> None:
    logits = torch.log(torch.tensor([0.2, 0.5, 0.3])).tolist()
    token_ids, _ = sample([logits] * 4, 1.0, [0.0, 0.19, 0.21, 0.71])
    assert token_ids.tolist() == [0, 0, 1, 2]


def test_impossible_tokens_are_never_drawn() -> None:
    impossible = -float("inf")
    most = 1.0 - 2.0**-52
    token_ids, logprobs = sample([[impossible, 0.0, impossible]] * 2, 1.0, [0.0, most])
    assert token_ids.tolist() == [1, 1]
    assert logprobs.tolist() == [0.0, 0.0]
    token_ids, _ = sample([[0.0] * 351], 1.0, [most])
    assert token_ids.tolist() == [350]


def test_noise_depends_on_seed_and_position_only() -> None:
    """M21: eight members have eight distinct streams, the same in any batch and any order."""
    seeds = np.arange(8, dtype=np.uint64)
    positions = np.arange(100, dtype=np.uint64)
    grid = uniform_noise(np.repeat(seeds, 100), np.tile(positions, 8)).reshape(8, 100)
    assert len(np.unique(grid)) == 800
    assert uniform_noise(seeds[3:4], positions[41:42])[0] == grid[3, 41]
    assert [uniform_at(int(seed), 7) for seed in seeds] == grid[:, 7].tolist()
    assert uniform_noise(seeds[::-1], np.full(8, 7, dtype=np.uint64)).tolist() == grid[::-1, 7].tolist()


def test_noise_is_uniform_and_uncorrelated() -> None:
    noise = uniform_noise(
        np.repeat(np.arange(200, dtype=np.uint64), 200), np.tile(np.arange(200, dtype=np.uint64), 200)
    )
    assert noise.min() >= 0.0 and noise.max() < 1.0
    counts = np.histogram(noise, bins=20, range=(0, 1))[0]
    # Chi-square of 40,000 draws over 20 bins: 19 degrees of freedom, 99.9 % below 43.8. The draws are fixed.
    assert ((counts - 2000) ** 2 / 2000).sum() < 43.8
    grid = noise.reshape(200, 200)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(top_p=0.9), "top_p is 0.9; only 1.0 is allowed"),
        (SamplingParams(top_k=5), r"top_k is 5; only 0 \(no limit\) is allowed"),
        (SamplingParams(temperature=0.0), "temperature is 0.0; it must be above 0"),
        (SamplingParams(max_new_tokens=-1), "max_new_tokens is -1"),
    ],
)
def test_sampling_with_wrong_logprobs_is_refused(sampling: SamplingParams, message: str) -> None:
    """M11: refused, naming the setting."""
    with pytest.raises(ValueError, match=message):
        check_sampling(sampling)
    check_sampling(SamplingParams(temperature=0.7))
