"""Learner checkpoints: weights, optimizer moments and counters, as safetensors and JSON. Nothing in them can run
code."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch.optim import Optimizer
from transformers import PreTrainedModel

from resources.object_store import ObjectStore
from tasks.training.model import policy_tensors

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class LearnerCounters:
    """Where training stands. Random draws derive from (seed, version, epoch), so these are the generator's state
    too."""

    seed: int
    version: int
    optimizer_step: int
    skipped_updates: int
    skipped_steps: int


def save_checkpoint(
    store: ObjectStore,
    prefix: str,
    model: PreTrainedModel,
    optimizer: Optimizer,
    counters: LearnerCounters,
    *,
    more: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> None:
    """Write ``model.safetensors``, ``optimizer.safetensors``, whatever else is to be kept (``more``: tensors by file
    name) and, last, ``state.json`` with their hashes."""
    steps: dict[str, float] = {}
    moments: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter)
        if state:
            steps[name] = float(state["step"])
            for moment in MOMENTS:
                moments[f"{moment}.{name}"] = state[moment].detach().cpu().contiguous()
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in policy_tensors(model).items()}
    files = {"model.safetensors": save(weights), "optimizer.safetensors": save(moments)}
    files |= {name: save(dict(tensors)) for name, tensors in (more or {}).items()}
    for name, data in files.items():
        store.put(f"{prefix}/{name}", data)
    store.put_json(
        f"{prefix}/state.json",
        {
            "format": FORMAT,
            "counters": asdict(counters),
            "adam_steps": steps,
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        },
    )


def restore_checkpoint(
    store: ObjectStore, prefix: str, model: PreTrainedModel, optimizer: Optimizer, *, seed: int
) -> LearnerCounters:
    """Put a checkpoint into model and optimizer; the next update is then bitwise the one that would have followed.

    Everything is checked before anything is changed.

    Raises:
        KeyError: when there is no complete checkpoint (``state.json`` is written last).
        ValueError: when a file is damaged, or was written for a model of other names or shapes, or with another seed.
    """
    where = store.uri(prefix)
    state: dict[str, Any] = store.get_json(f"{prefix}/state.json")
    if state["format"] != FORMAT:
        raise ValueError(f"checkpoint {where} has format {state['format']}; this version reads format {FORMAT}")
    counters = LearnerCounters(**state["counters"])
    if counters.seed != seed:
        raise ValueError(
            f"checkpoint {where} was written with seed {counters.seed}, not {seed}; resume with the same seed"
        )
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, expected in state["sha256"].items():
        data = store.get(f"{prefix}/{name}")
        if hashlib.sha256(data).hexdigest() != expected:
            raise ValueError(
                f"checkpoint {where}: {name} does not match its hash; it is damaged, resume from another one"
            )
        tensors[name] = load(data)
    weights, moments = tensors["model.safetensors"], tensors["optimizer.safetensors"]
    live = policy_tensors(model)
    _check_shapes(where, weights, live)
    parameters = dict(model.named_parameters())
    _check_shapes(
        where, moments, {f"{moment}.{name}": parameters[name] for name in state["adam_steps"] for moment in MOMENTS}
    )
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(weights[name])
    optimizer.state.clear()
    for name, step in state["adam_steps"].items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            "step": torch.tensor(step, dtype=torch.float32, device=parameter.device if _is_fused(optimizer) else "cpu"),
            **{moment: moments[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS},
        }
    return counters


def _is_fused(optimizer: Optimizer) -> bool:
    return bool(optimizer.defaults.get("fused"))


def _check_shapes(where: str, found: dict[str, torch.Tensor], expected: dict[str, Any]) -> None:
    if found.keys() != expected.keys():
        raise ValueError(
            f"checkpoint {where} is of another model: it lacks {sorted(expected.keys() - found.keys())[:4]} and has "
            f"{sorted(found.keys() - expected.keys())[:4]} beyond what this model has"
        )
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"checkpoint {where} is of another model: {name} has shape {tuple(tensor.shape)}, this model's has "
                f"{tuple(expected[name].shape)}"
            )
