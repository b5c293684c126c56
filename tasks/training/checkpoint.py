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
    scaling: float | None = None,
    more: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    writes: bool = True,
) -> None:
    """Write ``model.safetensors``, ``optimizer.safetensors``, whatever else is to be kept and, last, ``state.json``
    with their hashes. The same checkpoint that lies there already is left alone, another one is replaced.

    Sharded tensors are gathered, so that a checkpoint does not depend on the number of ranks: every rank calls this,
    and the one that ``writes`` writes.

    Args:
        tensors: what is learned, by name.
        parameters: those of them that the optimizer may hold moments of, by name.
        base: digest of the frozen weights beside which ``tensors`` were learned (LoRA).
        scaling: of the adapter that ``tensors`` are (LoRA).
        more: further tensors by file name, whole on every rank.
    """
    steps: dict[str, float] = {}
    moments: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        _collect(weights, name, tensor, writes)
    for name, parameter in parameters.items():
        held = optimizer.state.get(parameter)
        if held:
            steps[name] = float(held["step"])
            for moment in MOMENTS:
                _collect(moments, f"{moment}.{name}", held[moment], writes)
    if not writes:
        return
    files = {"model.safetensors": save(weights), "optimizer.safetensors": save(moments)}
    files |= {name: save(dict(kept)) for name, kept in (more or {}).items()}
    state: dict[str, Any] = {
        "format": FORMAT,
        "counters": asdict(counters),
        "adam_steps": steps,
        "base": base,
        "scaling": scaling,
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    key = f"{prefix}/state.json"
    if store.exists(key):
        if store.get_json(key) == state:
            return
        # While its files are replaced it is no checkpoint: who dies here leaves none, not a damaged one.
        store.delete(key)
    for name, data in files.items():
        store.put(f"{prefix}/{name}", data)
    store.put_json(key, state)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint as it was read: whole, its hashes checked."""

    where: str
    """For people."""
    counters: LearnerCounters
    adam_steps: dict[str, float]
    """By parameter."""
    base: str | None
    scaling: float | None
    """Of the adapter that it holds; None: the whole policy, or not written down."""
    files: dict[str, dict[str, torch.Tensor]]
    """By file name, the tensors by name."""


def read_checkpoint(store: ObjectStore, prefix: str) -> StoredCheckpoint:
    """Changes nothing.

    Raises:
        KeyError: there is no complete checkpoint (``state.json`` is written last).
        ValueError: another format, or a file that is damaged or missing.
    """
    where = store.uri(prefix)
    state: dict[str, Any] = store.get_json(f"{prefix}/state.json")
    if state["format"] != FORMAT:
        raise ValueError(f"checkpoint {where} has format {state['format']}; this version reads format {FORMAT}")
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, expected in state["sha256"].items():
        try:
            data = store.get(f"{prefix}/{name}")
        except KeyError:
            raise ValueError(f"checkpoint {where}: {name} is missing; resume from another one") from None
        if hashlib.sha256(data).hexdigest() != expected:
            raise ValueError(
                f"checkpoint {where}: {name} does not match its hash; it is damaged, resume from another one"
            )
        files[name] = load(data)
    counters = LearnerCounters(**state["counters"])
    return StoredCheckpoint(where, counters, state["adam_steps"], state.get("base"), state.get("scaling"), files)


def check_checkpoint(
    stored: StoredCheckpoint,
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    seed: int,
    base: str | None = None,
    scaling: float | None = None,
) -> None:
    """Whether a learner can go on from it. Arguments as `save_checkpoint` had them; the number of ranks may differ.

    Raises ValueError for one that was written for a model of other names or shapes, beside another base, for an adapter
    of another scaling, or with another seed.
    """
    where = stored.where
    if stored.counters.seed != seed:
        raise ValueError(
            f"checkpoint {where} was written with seed {stored.counters.seed}, not {seed}; resume with the same seed"
        )
    _check_shapes(where, stored.files["model.safetensors"], tensors)
    if stored.base != base:
        raise ValueError(
            f"checkpoint {where} is an adapter of the base {stored.base}, this learner's base is {base}; start "
            "from the same policy.model_directory"
        )
    if stored.scaling is not None and stored.scaling != scaling:
        raise ValueError(
            f"checkpoint {where} is an adapter scaled by {stored.scaling:g}, and training.lora.alpha / rank is "
            f"{scaling:g}: the same matrices would be another policy; resume with the same training.lora"
        )
    expected = {f"{moment}.{name}": parameters[name] for name in stored.adam_steps for moment in MOMENTS}
    _check_shapes(where, stored.files["optimizer.safetensors"], expected)


def load_checkpoint(
    stored: StoredCheckpoint,
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: Optimizer,
) -> None:
    """Put one that was checked into weights and optimizer; the next update is then bitwise the one that would have
    followed. With several ranks each has read the whole and keeps its shards."""
    weights, moments = stored.files["model.safetensors"], stored.files["optimizer.safetensors"]
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(like(weights[name], tensor))
    optimizer.state.clear()
    for name, step in stored.adam_steps.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            "step": torch.tensor(step, dtype=torch.float32, device=parameter.device if _is_fused(optimizer) else "cpu"),
            **{moment: like(moments[f"{moment}.{name}"], parameter.detach()) for moment in MOMENTS},
        }


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
    for name in sorted(found):
        if found[name].shape != expected[name].shape:
            raise ValueError(
                f"checkpoint {where} is of another model: {name} has shape {tuple(found[name].shape)}, this model's "
                f"has {tuple(expected[name].shape)}"
            )
