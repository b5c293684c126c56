"""Which token follows, and how likely was it? The draws come from `noise`, a function of (seed, position) only.

Shapes: B rows to sample, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch


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
