"""The critic: a value head on the decoder's hidden states, with an optimizer of its own.

The value before a sampled token is read where that token is predicted. Loss of a token (PPO's clipped value loss, arXiv
1707.06347; as in the reference implementations): half of max((V - G)^2, (V_old + clip(V - V_old, -c, c) - G)^2), G the
return and V_old the value with which the update started. Legend: N tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tasks.training.algorithm_config import CriticConfig
from tasks.training.checkpoint import MOMENTS, StoredCheckpoint
from tasks.training.ranks import Ranks

CRITIC_FILE = "critic.safetensors"
"""Where a checkpoint keeps it."""


class Critic:
    """Starts at value 0 everywhere. One thread at a time."""

    def __init__(self, width: int, config: CriticConfig, device: str) -> None:
        self.config = config
        self.head = torch.nn.Linear(width, 1, device=device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=config.learning_rate, weight_decay=0.0)

    def values(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """float32 [N], with gradient; it reaches the decoder only if ``train_decoder``."""
        hidden_ND = hidden_ND if self.config.train_decoder else hidden_ND.detach()
        return self.head(hidden_ND.float()).squeeze(-1)

    def losses(
        self, values_N: torch.Tensor, start_values_N: torch.Tensor, returns_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of each token [N], weighed against the policy's where both move the decoder; and whether its clip is
        active [N, bool]."""
        clip = self.config.value_clip
        bounded_N = start_values_N + (values_N - start_values_N).clamp(-clip, clip)
        plain_N, bounded_N = (values_N - returns_N).square(), (bounded_N - returns_N).square()
        weight = self.config.coefficient if self.config.train_decoder else 1.0
        return 0.5 * weight * torch.maximum(plain_N, bounded_N), (bounded_N > plain_N).detach()

    def sum_gradients(self, ranks: Ranks) -> None:
        """Add up the head's gradient over ranks, each of which ran its own rows; the head itself lies on all of
        them."""
        if ranks.size == 1:
            return
        for parameter in self.head.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = ranks.sum(gradient)

    def clip_gradient(self) -> torch.Tensor:
        """Scale the head's gradient down; returns its 2-norm before, a scalar."""
        return torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.max_grad_norm)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Head and moments on the CPU, by name, for a checkpoint."""
        tensors = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        for name, parameter in self.head.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Whether `load` can take it. Raises ValueError when it is of another decoder."""
        expected = {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        for name, parameter in self.head.named_parameters():
            moments = (f"optimizer.{name}.{key}" for key in MOMENTS)
            expected |= {moment: parameter for moment in moments if moment in tensors}
        for name, tensor in expected.items():
            found = tensors.get(name)
            if found is None or found.shape != tensor.shape:
                shape = None if found is None else tuple(found.shape)
                raise ValueError(
                    f"the checkpoint's critic has {name} of shape {shape}, this one {tuple(tensor.shape)}; it is of "
                    "another model"
                )

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `tensors` gave, once it was checked."""
        with torch.no_grad():
            for name, tensor in self.head.state_dict().items():
                tensor.copy_(tensors[f"head.{name}"])
        self.optimizer.state.clear()
        for name, parameter in self.head.named_parameters():
            prefix = f"optimizer.{name}."
            state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            if state:
                self.optimizer.state[parameter] = {
                    key: value.clone() if key == "step" else value.to(parameter.device) for key, value in state.items()
                }


def stored_critic(stored: StoredCheckpoint) -> dict[str, torch.Tensor]:
    """What `Critic.tensors` gave when the checkpoint was written.

    Raises ValueError when the checkpoint was written without a critic.
    """
    if CRITIC_FILE not in stored.files:
        raise ValueError(
            f"checkpoint {stored.where} was written without a critic, and training.critic is given; resume with "
            "training.critic null, or start a new run"
        )
    return stored.files[CRITIC_FILE]
