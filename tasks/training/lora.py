"""LoRA (arXiv 2106.09685): the base stays as it is, a low-rank adapter beside its matrices is trained.

The adapter is PEFT's. Checkpoints hold the adapter alone. So do versions, or they hold the policy with the adapter
merged (``training.lora.publish``); either way an engine computes with the same matrices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from resources.weights.adapter import PREFIX, merged_matrix
from resources.weights.manifest import AdapterEntry
from tasks.training.config import LoraConfig
from tasks.training.sharding import whole

if TYPE_CHECKING:
    import peft

ADAPTER = "default"
CONFIG_FILE = "adapter_config.json"
"""PEFT's name for it."""


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
        peft.inject_adapter_in_model(_peft_config(config), model, adapter_name=ADAPTER)


def adapter_entry(config: LoraConfig, base_digest: str) -> AdapterEntry:
    """What the manifest of a version says of the adapter that it holds."""
    return AdapterEntry(base_digest=base_digest, scaling=config.scaling)


def adapter_tensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter's matrices under the names that PEFT's files have. Gathers what is sharded: every rank iterates."""
    for name, tensor in tensors.items():
        if f".{ADAPTER}." in name:
            yield PREFIX + name.replace(f".{ADAPTER}.", "."), whole(tensor)


def adapter_files(config: LoraConfig, base: str) -> dict[str, bytes]:
    """PEFT's configuration of the adapter, by file name. ``base``: where the model lies that it belongs to."""
    described = _peft_config(config).to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in described.items()}
    return {CONFIG_FILE: json.dumps(ordered, indent=2, sort_keys=True).encode()}


def _peft_config(config: LoraConfig) -> peft.LoraConfig:
    import peft

    return peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets), task_type="CAUSAL_LM"
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
            full = merged_matrix(full, down, up, config.scaling)
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
