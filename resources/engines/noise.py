"""Noise as a function of (seed, position) only, so that a trajectory does not depend on the batch, the slot or the
engine that it ran on."""

from __future__ import annotations

import numpy as np

# Finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = 2**64 - 1
_S30, _S27, _S31, _S12 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(12)


def uniform_noise(seeds_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """Float64 [B] in [0, 1), one number per (seed, position). Seeds and positions are uint64 [B].

    52 bits, so that noise times a total is always below the total.
    """
    return (_mix(_mix(seeds_B + _GOLDEN) + positions_B * _GOLDEN) >> _S12) * 2.0**-52


def uniform_at(seed: int, position: int) -> float:
    """One number of `uniform_noise`, without the cost of arrays."""
    mixed = _mix_int(_mix_int(seed + int(_GOLDEN)) + position * int(_GOLDEN))
    return (mixed >> 12) * 2.0**-52


def _mix_int(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * int(_MIX_1) & _MASK
    z = (z ^ (z >> 27)) * int(_MIX_2) & _MASK
    return z ^ (z >> 31)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)
