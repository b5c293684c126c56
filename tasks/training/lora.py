"""LoRA (arXiv 2106.09685): the base stays as it is, a low-rank adapter beside its matrices is trained.

The adapter is PEFT's. Checkpoints hold the adapter alone; what is published is the policy with the adapter merged,
which every engine loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from tasks.training.config import LoraConfig
from tasks.training.sharding import whole

ADAPTER = "default"


def add_adapter(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freeze the model and put an adapter beside the target matrices, in place. It starts as nothing: B is 0.

    Raises:
        ValueError: a target that is no linear layer of the model.
    """
    import peft

    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    linear.discard("lm_head")
    if unknown := sorted(set(config.targets) - linear):
        raise ValueError(
            f"training.lora.targets names {unknown}, which no linear layer of {type(model).__name__} is called; "
            f"allowed: {sorted(linear)}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets)),
            model,
            adapter_name=ADAPTER,
        )


def merged_tensors(tensors: Mapping[str, torch.Tensor], config: LoraConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The policy as if it had no adapter: W + alpha / rank * B A under the policy's own names. Gathers what is sharded:
    every rank iterates."""
    for name, tensor in tensors.items():
        if f".{ADAPTER}." in name:
            continue
        full = whole(tensor)
        if ".base_layer." in name:
            layer = name.partition(".base_layer.")[0]
            down, up = (whole(tensors[f"{layer}.lora_{part}.{ADAPTER}.weight"]) for part in "AB")
            full = full + (config.alpha / config.rank) * (up @ down)
        yield name.replace(".base_layer.", "."), full


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """The model computes as its base within the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
