"""AdamW (arXiv 1711.05101) over matrices with weight decay and over vectors without."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tasks.training.config import OptimizerConfig


def build_optimizer(parameters: Sequence[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """The learning rate is set anew for every update (see `schedule`)."""
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.adam_epsilon,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Of all parameters, from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
