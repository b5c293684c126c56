"""The policy over several ranks: parameters, gradients and moments are sharded, each rank holds its part (FSDP2).

`fully_shard` gathers a layer's parameters just before it runs and scatters the sum of its gradients right behind its
backward pass. Gradients are summed, never averaged: the weights of tokens are those of the whole step already, so loss
and gradient do not depend on the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from tasks.training.config import TrainingConfig
from tasks.training.forward import PolicyForward
from tasks.training.ranks import Ranks


def shard(forward: PolicyForward, ranks: Ranks) -> None:
    """Shard the policy over the ranks, layer by layer; one rank keeps everything as it is.

    From here on the policy runs through ``forward`` only, on all ranks at once and equally often: every forward and
    every backward pass is a collective.
    """
    if ranks.mesh is None:
        return
    for layer in forward.layers:
        fully_shard(layer, mesh=ranks.mesh)
    fully_shard(forward, mesh=ranks.mesh)
    for module in forward.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this a factor other than the number of ranks becomes an operation that gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def sharded_forward(
    model: PreTrainedModel, config: TrainingConfig, ranks: Ranks, *, recompute_layers: bool = False
) -> PolicyForward:
    """The configured forward pass of a model, sharded over the ranks (see `shard`)."""
    forward = PolicyForward(
        model, config.max_logits_per_chunk, precision=config.precision, recompute_layers=recompute_layers
    )
    shard(forward, ranks)
    return forward


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a shard; a collective where the tensor is sharded, the tensor itself elsewhere."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: torch.Tensor, model: Any) -> torch.Tensor:
    """A full tensor, on the device and in the shards of ``model``. Every rank holds the full one: nothing travels."""
    tensor = tensor.to(model.device)
    if isinstance(model, DTensor):
        return distribute_tensor(tensor, model.device_mesh, model.placements, src_data_rank=None)
    return tensor
