"""Which seed does an episode, or a sampler, get? Stable hashes, so that any process works out the same one.

The convention: episode seeds are 63-bit integers. Train seeds lie below 2**62, eval seeds at or above it, so no
evaluation episode is ever trained on, whatever the indices. Within one run the indices of a family count its groups
(train; with ``num_prompts`` they name the prompts of its pool) or its evaluation episodes (eval). Families with few
distinct problems (``guess_number`` has seven) repeat problems, never seeds (without a pool).
"""

from __future__ import annotations

import hashlib
import random

from resources.rollout.messages import Split

_SEED_BITS = 62
EVAL_SEEDS_FROM = 1 << _SEED_BITS
"""Train seeds are below, eval seeds at or above."""


def episode_seed(run_seed: int, family: str, index: int, split: Split) -> int:
    """Environment seed of the ``index``-th group (or evaluation episode) of a family; shared by the group's members."""
    if split not in ("train", "eval"):
        raise ValueError(f"split is {split!r}; it must be 'train' or 'eval'")
    seed = _hash("episode", run_seed, family, index, split)
    return seed + EVAL_SEEDS_FROM if split == "eval" else seed


def sampling_seed(run_seed: int, group_id: str, member: int, attempt: int, engine: str | int = "") -> int:
    """Seed of the sampler of one trajectory: distinct for every group, member, attempt and engine. Below 2**62."""
    return _hash("sampling", run_seed, group_id, member, attempt, engine)


def turn_draw(sampling_seed: int, turn: int) -> float:
    """Uniform in [0, 1), for one turn of the trajectory with this sampling seed; independent of its tokens' noise."""
    return (_hash("turn", sampling_seed, turn) >> (_SEED_BITS - 53)) / (1 << 53)


def prompt_order(run_seed: int, family: str, epoch: int, num_prompts: int) -> list[int]:
    """A family's pool of prompts, ``0 .. num_prompts - 1``, in the order of an epoch."""
    order = list(range(num_prompts))
    random.Random(_hash("prompts", run_seed, family, epoch)).shuffle(order)
    return order


def split_of(seed: int) -> Split:
    """The split whose range an episode seed lies in."""
    return "eval" if seed >= EVAL_SEEDS_FROM else "train"


def narrow_seed(seed: int) -> int:
    """An episode seed for libraries that take 31 bits: the split keeps a bit of its own, so no train seed becomes an
    eval seed."""
    return (seed % (1 << 30)) | (int(split_of(seed) == "eval") << 30)


def _hash(*parts: str | int) -> int:
    # repr keeps 1 and "1" apart, and the separator cannot appear in the repr of a string.
    digest = hashlib.blake2b("\n".join(map(repr, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)
