"""How long does a step of a simulated engine take? A roofline: the slower of arithmetic and memory traffic.

A step takes 2 FLOPs per parameter for every token that it computes, and reads the weights and the KV of every history
that it continues once. Not counted: the FLOPs of attention, and the KV that is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from resources.engines.simulated_config import SimulatedConfig


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of steps of one engine. Constants are per unit, efficiencies included."""

    seconds_per_token: float
    """Arithmetic of one token."""
    seconds_of_weights: float
    """One read of the weights."""
    seconds_per_kv_token: float
    """One read of the KV of one token."""
    overhead_s: float

    @classmethod
    def of(cls, config: SimulatedConfig, hardware_class: str) -> StepTiming:
        hardware = config.of_class(hardware_class)
        bytes_per_s = hardware.bytes_per_s * hardware.bandwidth_efficiency
        return cls(
            seconds_per_token=2.0 * config.num_parameters / (hardware.flops_per_s * hardware.compute_efficiency),
            seconds_of_weights=config.weight_bytes / bytes_per_s,
            seconds_per_kv_token=config.kv_bytes_per_token / bytes_per_s,
            overhead_s=hardware.step_overhead_s,
        )

    def step(self, num_tokens: int, kv_tokens: int) -> float:
        """A step that computes ``num_tokens`` and reads the KV of ``kv_tokens``."""
        arithmetic = num_tokens * self.seconds_per_token
        traffic = self.seconds_of_weights + kv_tokens * self.seconds_per_kv_token
        return max(arithmetic, traffic) + self.overhead_s

    def decode_steps(self, num_steps: int, batch: int, kv_tokens: int) -> float:
        """``num_steps`` steps in a row, each of one token for each of ``batch`` histories, whose KV starts at
        ``kv_tokens`` in all and grows by ``batch`` a step: the sum of `step`, in closed form."""
        arithmetic = batch * self.seconds_per_token
        traffic = self.seconds_of_weights + kv_tokens * self.seconds_per_kv_token
        growth = batch * self.seconds_per_kv_token
        # The first steps may be bound by arithmetic; from this one on memory traffic is at least as slow.
        if arithmetic <= traffic:
            bound = 0
        elif arithmetic >= traffic + growth * num_steps:
            bound = num_steps
        else:
            bound = min(num_steps, math.ceil((arithmetic - traffic) / growth))
        rest = num_steps - bound
        grown = growth * (num_steps * (num_steps - 1) - bound * (bound - 1)) / 2
        return bound * arithmetic + rest * traffic + grown + num_steps * self.overhead_s

    def decode_steps_beyond(self, seconds: float, most: int, batch: int, kv_tokens: int) -> int:
        """The fewest such steps (1 to ``most``) that take longer than ``seconds``; ``most`` when fewer do not."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.decode_steps(middle, batch, kv_tokens) > seconds:
                high = middle
            else:
                low = middle + 1
        return low
