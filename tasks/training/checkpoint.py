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

from resources.object_store import ObjectStore
from tasks.training.sharding import like, whole

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
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: Optimizer,
    counters: LearnerCounters,
    *,
    base: str | None = None,
    more: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    writes: bool = True,
) -> None:
    """Write ``model.safetensors``, ``optimizer.safetensors``, whatever else is to be kept and, last, ``state.json``
    with their hashes.

    Sharded tensors are gathered, so that a checkpoint does not depend on the number of ranks: every rank calls this,
    and the one that ``writes`` writes.

    Args:
        tensors: what is learned, by name.
        parameters: those of them that the optimizer may hold moments of, by name.
        base: digest of the frozen weights beside which ``tensors`` were learned (LoRA).
        more: further tensors by file name, whole on every rank.
    """
    steps: dict[str, float] = {}
    moments: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        _collect(weights, name, tensor, writes)
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter)
        if state:
            steps[name] = float(state["step"])
            for moment in MOMENTS:
                _collect(moments, f"{moment}.{name}", state[moment], writes)
    if not writes:
        return
    files = {"model.safetensors": save(weights), "optimizer.safetensors": save(moments)}
    files |= {name: save(dict(kept)) for name, kept in (more or {}).items()}
    for name, data in files.items():
        store.put(f"{prefix}/{name}", data)
    store.put_json(
        f"{prefix}/state.json",
        {
            "format": FORMAT,
            "counters": asdict(counters),
            "adam_steps": steps,
            "base": base,
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        },
    )


def restore_checkpoint(
    store: ObjectStore,
    prefix: str,
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: Optimizer,
    *,
    seed: int,
    base: str | None = None,
) -> LearnerCounters:
    """Put a checkpoint into weights and optimizer; the next update is then bitwise the one that would have followed.

    Everything is checked before anything is changed. With several ranks each reads the whole and keeps its shards.

    Raises:
        KeyError: when there is no complete checkpoint (``state.json`` is written last).
        ValueError: when a file is damaged, or was written for a model of other names or shapes, beside another base, or
            with another seed.
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
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, expected in state["sha256"].items():
        data = store.get(f"{prefix}/{name}")
        if hashlib.sha256(data).hexdigest() != expected:
            raise ValueError(
                f"checkpoint {where}: {name} does not match its hash; it is damaged, resume from another one"
            )
        files[name] = load(data)
    weights, moments = files["model.safetensors"], files["optimizer.safetensors"]
    _check_shapes(where, weights, tensors)
    if state.get("base") != base:
        raise ValueError(
            f"checkpoint {where} is an adapter of the base {state.get('base')}, this learner's base is {base}; start "
            "from the same policy.model_directory"
        )
    _check_shapes(
        where, moments, {f"{moment}.{name}": parameters[name] for name in state["adam_steps"] for moment in MOMENTS}
    )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(like(weights[name], tensor))
    optimizer.state.clear()
    for name, step in state["adam_steps"].items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            "step": torch.tensor(step, dtype=torch.float32, device=parameter.device if _is_fused(optimizer) else "cpu"),
            **{moment: like(moments[f"{moment}.{name}"], parameter.detach()) for moment in MOMENTS},
        }
    return counters


def _collect(into: dict[str, torch.Tensor], name: str, tensor: torch.Tensor, keep: bool) -> None:
    full = whole(tensor.detach())
    if keep:
        into[name] = full.cpu().contiguous()


def _is_fused(optimizer: Optimizer) -> bool:
    return bool(optimizer.defaults.get("fused"))


def _check_shapes(where: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, Any]) -> None:
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
