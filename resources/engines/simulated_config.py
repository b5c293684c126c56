"""What a simulated engine pretends to be: the model's size, each class's figures, the answers, and faults.

The default figures are those of an 8B policy with grouped-query attention on two accelerators of the field, one strong
in FLOP/s and one in bytes/s.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_MODEL = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class SimulatedHardware(BaseModel):
    """What one engine of a hardware class has: the peak figures of its accelerators together, and how much of them is
    reached."""

    model_config = _MODEL

    flops_per_s: float = Field(gt=0)
    """Peak FLOP/s at the precision that is served."""
    bytes_per_s: float = Field(gt=0)
    """Peak bytes/s of the accelerator's memory."""
    memory_bytes: float = Field(gt=0)
    """Memory of the accelerator, in bytes: weights (twice, see ``swap_bytes_per_s``) and KV must fit."""
    load_bytes_per_s: float = Field(default=5e9, gt=0)
    """Bytes/s at which published weights arrive at the engine's machine."""
    swap_bytes_per_s: float | None = Field(default=None, gt=0)
    """Bytes/s at which weights that have arrived are taken into use, while the engine is suspended. None: they lie on
    the accelerator beside those in use, and the switch takes no time."""
    compute_efficiency: float = Field(default=0.5, gt=0, le=1)
    """Share of ``flops_per_s`` that is reached."""
    bandwidth_efficiency: float = Field(default=0.8, gt=0, le=1)
    """Share of ``bytes_per_s`` that is reached."""
    step_overhead_s: float = Field(default=0.0, ge=0)
    """Seconds that a step takes beyond arithmetic and memory traffic (scheduling, kernel launches)."""


class ScriptedAnswers(BaseModel):
    """How long answers are. The tokens themselves are drawn evenly, from (seed, position)."""

    model_config = _MODEL

    length: Literal["fixed", "uniform", "geometric", "lognormal"] = "fixed"
    """Distribution of an answer's tokens, its stop token included. ``uniform``: from 1 to twice the mean less 1.
    ``lognormal``: with ``sigma``, the long tail of reasoning."""
    mean_tokens: float = Field(default=8.0, ge=1)
    """Mean of that distribution (before ``max_new_tokens`` cuts)."""
    sigma: float = Field(default=1.0, gt=0, le=4)
    """``lognormal`` only: standard deviation of the logarithm."""
    token_ids: tuple[int, int] | None = None
    """First id, and first id beyond, of the tokens that are drawn. None: the middle half of the vocabulary, which holds
    no special tokens in the usual tokenizers."""

    @model_validator(mode="after")
    def _ids_are_a_range(self) -> ScriptedAnswers:
        if self.token_ids is not None and not 0 <= self.token_ids[0] < self.token_ids[1] - 1:
            raise ValueError(
                f"engine.simulated.answers.token_ids is {list(self.token_ids)}; it must be [first, beyond] with "
                "first >= 0 and at least two ids between them"
            )
        return self


class Fault(BaseModel):
    """Something that goes wrong on some engines, once its one trigger is reached."""

    model_config = _MODEL

    kind: Literal["slow", "hang", "crash", "wrong_version"]
    """``slow``: steps take ``factor`` times as long. ``hang``: no step ends, though the engine answers calls.
    ``crash``: the step loop dies; running requests are handed back with what they have, later ones refused.
    ``wrong_version``: answers claim a version that was never loaded."""
    engine: str | None = None
    """Name of the engine (``<class>-<index>``, e.g. ``compute-0``); None: every engine of ``hardware_class``."""
    hardware_class: str | None = None
    """Class of the engines; None: of every class."""
    after_requests: int | None = Field(default=None, ge=1)
    """Trigger: the request of this number arrives at the engine, counted from 1."""
    after_s: float | None = Field(default=None, ge=0)
    """Trigger: so many simulated seconds after the engine's start."""
    probability: float | None = Field(default=None, gt=0, le=1)
    """Trigger: drawn anew, from ``seed``, with every request that arrives while the fault is not active."""
    seed: int = Field(default=0, ge=0)
    """Of the draws of ``probability``; the engine's name enters as well."""
    duration_s: float | None = Field(default=None, gt=0)
    """Simulated seconds until it is over; None: it never is. ``crash`` takes none."""
    factor: float | None = Field(default=None, gt=1)
    """``slow`` only, and needed there: how many times as long a step takes."""

    @model_validator(mode="after")
    def _is_one_fault(self) -> Fault:
        triggers = {name: getattr(self, name) for name in ("after_requests", "after_s", "probability")}
        given = {name: value for name, value in triggers.items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                f"engine.simulated.faults: a {self.kind!r} fault has the triggers {given or 'none'}; give exactly one "
                f"of {', '.join(triggers)}"
            )
        if self.kind == "crash" and self.duration_s is not None:
            raise ValueError(
                f"engine.simulated.faults: duration_s is {self.duration_s:g} for a 'crash', which is final; leave it "
                "out"
            )
        if (self.factor is None) == (self.kind == "slow"):
            raise ValueError(
                f"engine.simulated.faults: factor is {self.factor} for a {self.kind!r} fault; 'slow' needs one above "
                "1, the others take none"
            )
        if self.engine is not None and self.hardware_class is not None:
            raise ValueError(
                f"engine.simulated.faults: both engine ({self.engine!r}) and hardware_class ({self.hardware_class!r}) "
                "are given; an engine's name says its class, leave hardware_class out"
            )
        return self


def _default_hardware() -> dict[str, SimulatedHardware]:
    return {
        "compute": SimulatedHardware(flops_per_s=989e12, bytes_per_s=3.35e12, memory_bytes=80e9),
        "bandwidth": SimulatedHardware(flops_per_s=148e12, bytes_per_s=4.0e12, memory_bytes=96e9),
    }


class SimulatedConfig(BaseModel):
    """Engines without a model."""

    model_config = _MODEL

    time_scale: float = Field(default=1.0, gt=0)
    """Simulated seconds that pass in one second. What the system reports stays in seconds of the machine."""
    num_parameters: float = Field(default=8.2e9, gt=0)
    """Parameters that a token passes through: a decode step takes 2 FLOPs for each."""
    bytes_per_parameter: float = Field(default=2.0, gt=0)
    """2 for bfloat16."""
    kv_bytes_per_token: float = Field(default=147456, ge=0)
    """2 (keys, values) x layers x key-value heads x head size x bytes per number."""
    hardware: dict[str, SimulatedHardware] = Field(default_factory=_default_hardware)
    """Figures by hardware class; every class with role ``engine`` needs an entry."""
    answers: ScriptedAnswers = ScriptedAnswers()
    """What is sampled."""
    faults: tuple[Fault, ...] = ()
    """Faults to inject."""

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.bytes_per_parameter

    def of_class(self, hardware_class: str) -> SimulatedHardware:
        """Raises ValueError naming the classes that have figures."""
        try:
            return self.hardware[hardware_class]
        except KeyError:
            raise ValueError(
                f"engine.simulated.hardware has no figures for hardware class {hardware_class!r}; it has "
                f"{sorted(self.hardware)}: add flops_per_s, bytes_per_s and memory_bytes of that class"
            ) from None

    def kv_capacity_tokens(self, hardware_class: str) -> int:
        """Tokens whose KV fits beside the weights."""
        hardware = self.of_class(hardware_class)
        copies = 2 if hardware.swap_bytes_per_s is None else 1
        left = hardware.memory_bytes - copies * self.weight_bytes
        return int(left / self.kv_bytes_per_token) if self.kv_bytes_per_token else 2**62

    @model_validator(mode="after")
    def _weights_fit(self) -> SimulatedConfig:
        for name, hardware in self.hardware.items():
            if self.kv_capacity_tokens(name) < 1:
                raise ValueError(
                    f"engine.simulated.hardware.{name}.memory_bytes is {hardware.memory_bytes:.3g}, too little for "
                    f"weights of {self.weight_bytes:.3g} bytes and any KV; raise it, set swap_bytes_per_s (one copy of "
                    "the weights instead of two), or lower num_parameters"
                )
        return self
