"""LoRA (arXiv 2106.09685): the base stays as it is, a low-rank adapter beside its matrices is trained and published.

The adapter is PEFT's, so that what is published loads wherever PEFT adapters load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from tasks.training.config import LoraConfig

ADAPTER = "default"
PUBLISHED_PREFIX = "base_model.model."
"""What PEFT puts before a parameter's name in an adapter's file."""


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


def published_name(name: str) -> str:
    """The name of an adapter's parameter in its file."""
    return PUBLISHED_PREFIX + name.replace(f".{ADAPTER}.", ".")


def adapter_config(config: LoraConfig, base: str) -> dict[str, Any]:
    """What PEFT's ``adapter_config.json`` holds. ``base`` names the model that the adapter belongs to."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(config.targets),
        "inference_mode": True,
    }


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
