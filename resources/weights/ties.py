"""Tensors that are one tensor: a tied head is left out of the file and written down, a forgotten one is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def split_ties(
    tensors: Mapping[str, torch.Tensor], config_json: bytes | None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors to store, name left out -> name it equals).

    Tensors that share memory are stored once. ``config_json`` says whether the head is tied; without it a missing head
    cannot be judged. Raises ValueError when an untied head is missing, or a tied one is another matrix.
    """
    stored = dict(tensors)
    tied: dict[str, str] = {}
    by_memory: dict[tuple[Any, ...], str] = {}
    for name in sorted(stored, key=lambda name: (name == HEAD, name)):  # the head is the one that is left out
        tensor = stored[name]
        memory = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        first = by_memory.setdefault(memory, name)
        if first != name and tensor.numel():
            tied[name] = first
            del stored[name]
    head_is_tied = None if config_json is None else ties_head(config_json)
    if head_is_tied and EMBEDDING in stored and HEAD not in tied:
        if HEAD in stored and not _equal(stored.pop(HEAD), stored[EMBEDDING]):
            raise ValueError(
                f"weights: {HEAD} differs from {EMBEDDING}, but config.json ties them (tie_word_embeddings); "
                "publish one matrix, or set it to false"
            )
        tied[HEAD] = EMBEDDING
    if head_is_tied is False and EMBEDDING in stored and HEAD not in stored:
        raise ValueError(f"weights: {HEAD} is missing and config.json does not tie it (tie_word_embeddings is false)")
    return stored, tied


def expected_tensors(
    tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str], expected: set[str], what: str
) -> dict[str, torch.Tensor]:
    """Exactly the expected names, a tied one as the tensor it equals. Raises ValueError, about ``what``, naming what is
    missing and what is unmatched (S24)."""
    missing = sorted(expected - tensors.keys() - tied.keys())
    unmatched = sorted(tensors.keys() - expected)
    if missing or unmatched:
        raise ValueError(
            f"{what} does not fit the model that is to load it: missing {missing[:5]} ({len(missing)} in all), "
            f"unmatched {unmatched[:5]} ({len(unmatched)} in all)"
        )
    found = dict(tensors)
    return found | {name: found[tied[name]] for name in expected - found.keys()}


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())


def ties_head(config_json: bytes) -> bool:
    """Whether a ``config.json`` makes the head the embedding."""
    config = json.loads(config_json)
    if "tie_word_embeddings" in config:
        return bool(config["tie_word_embeddings"])
    from transformers import AutoConfig  # a config that leaves it out means its model type's default

    return bool(AutoConfig.for_model(**config).tie_word_embeddings)
