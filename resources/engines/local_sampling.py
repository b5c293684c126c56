"""Which token follows, and how likely was it? Noise is a function of (seed, position) only, so a trajectory does not
depend on the batch, the slot or the engine that it ran on.

Shapes: B rows to sample, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

# Finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S12 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(12)


def uniform_noise(seeds_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """Float64 [B] in [0, 1), one number per (seed, position). Seeds and positions are uint64 [B].

    52 bits, so that noise times a total is always below the total.
    """
    return (_mix(_mix(seeds_B + _GOLDEN) + positions_B * _GOLDEN) >> _S12) * 2.0**-52


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


def sample_tokens(
    logits_BV: torch.Tensor, temperatures_B: np.ndarray, noise_B: np.ndarray, greedy_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row by inverse CDF; returns ids int64 [B] and logprobs float32 [B].

    Logprobs are those of the logits divided by the temperature, for greedy rows too. A token of probability 0 is never
    drawn. ``logits_BV`` is overwritten.
    """
    device = logits_BV.device
    if np.any(temperatures_B != 1.0):
        logits_BV /= torch.from_numpy(temperatures_B.astype(np.float32)).to(device)[:, None]
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    cdf_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    target_B1 = cdf_BV[:, -1:] * torch.from_numpy(noise_B).to(device)[:, None]
    ids_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
    if np.any(greedy_B):
        rows = torch.from_numpy(greedy_B).to(device)
        ids_B1[rows] = logprobs_BV[rows].argmax(dim=-1, keepdim=True)
    logprobs_B = logprobs_BV.gather(1, ids_B1)
    return ids_B1[:, 0].cpu().numpy(), logprobs_B[:, 0].cpu().numpy()
