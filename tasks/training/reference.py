"""The frozen reference policy: what the current one is held close to.

Its log-probabilities are computed once an update, without gradient, and only for a loss that asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from tasks.training.algorithms import Algorithms
from tasks.training.forward import PolicyForward
from tasks.training.lora import adapter_off
from tasks.training.losses.reference_kl import reference_kl
from tasks.training.packing import MicroBatch
from tasks.training.row import TrainingRow


class Reference(Protocol):
    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probability of each trained token, float32 [N], without gradient. A collective of all ranks."""
        ...


class FrozenCopy:
    """A second model in memory, sharded like the policy."""

    def __init__(self, forward: PolicyForward) -> None:
        self._forward = forward.requires_grad_(False)

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        with torch.no_grad():
            return self._forward.logprobs(batch)[0]


class AdapterOff:
    """The policy itself without its LoRA adapter: the base costs no second copy."""

    def __init__(self, forward: PolicyForward) -> None:
        self._forward = forward

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        with torch.no_grad(), adapter_off(self._forward.model):
            return self._forward.logprobs(batch)[0]


def reward_penalties(
    algorithms: Algorithms, rows: Sequence[TrainingRow], reference_RT: Sequence[np.ndarray]
) -> list[np.ndarray] | None:
    """What is taken from the rewards for leaving the reference: float32 [T] for each row, at sampled tokens. None: no
    algorithm takes it from the rewards (``training.kl.place``)."""
    if not any(algorithm.kl.coefficient and algorithm.kl.place == "reward" for algorithm in algorithms.all):
        return None
    penalties = []
    for row, reference_T in zip(rows, reference_RT, strict=True):
        kl = algorithms.of(row.family).kl
        penalty_T = np.zeros(len(row.token_ids), np.float32)
        if kl.place == "reward" and kl.coefficient:
            sampled = row.loss_mask
            behaviour, reference = torch.tensor(row.behaviour_logprobs[sampled]), torch.tensor(reference_T[sampled])
            penalty_T[sampled] = kl.coefficient * reference_kl(behaviour, reference, kl.estimator).numpy()
        penalties.append(penalty_T)
    return penalties
