"""The frozen reference policy: what the current one is held close to.

Its log-probabilities are computed once an update, without gradient, and only for a loss that asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from tasks.training.algorithms import Algorithms
from tasks.training.config import TrainingConfig
from tasks.training.forward import PolicyForward
from tasks.training.lora import adapter_off
from tasks.training.losses.reference_kl import reference_kl
from tasks.training.model import load_policy
from tasks.training.packing import MicroBatch
from tasks.training.ranks import Ranks
from tasks.training.row import TrainingRow
from tasks.training.sharding import sharded_forward


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


def build_reference(
    policy: PolicyForward, model_directory: str | Path, config: TrainingConfig, *, device: str, ranks: Ranks
) -> Reference:
    """The reference that ``training.reference`` names, or the policy that the run starts from.

    Args:
        policy: what is trained; its base is the reference of a LoRA run that names no other.
        model_directory: of the policy that the run starts from.

    Raises:
        ValueError: there is no such folder, or its model has another vocabulary.
    """
    directory = config.reference.model_directory if config.reference else None
    if directory is None and config.lora is not None:
        return AdapterOff(policy)
    if directory is not None and not Path(directory).is_dir():
        raise ValueError(
            f"training.reference.model_directory is {directory!r}, and there is no such folder where the learner "
            "runs; give the folder of a model, or leave it out for the policy that the run starts from"
        )
    model = load_policy(directory or model_directory, config.layout, device)
    expected = int(policy.model.config.get_text_config().vocab_size)
    if (size := int(model.config.get_text_config().vocab_size)) != expected:
        raise ValueError(
            f"training.reference.model_directory is {directory!r}, whose vocabulary holds {size} tokens, the "
            f"policy's {expected}; give a model with the policy's tokenizer"
        )
    return FrozenCopy(sharded_forward(model, config, ranks))


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
