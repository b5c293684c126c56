"""The frozen reference policy: what the current one is held close to.

Its log-probabilities are computed once an update, without gradient, and only for a loss that asks for them.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tasks.training.forward import PolicyForward
from tasks.training.lora import adapter_off
from tasks.training.packing import MicroBatch


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
