"""What a simulated learner pretends to be."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SimulatedLearnerConfig(BaseModel):
    """A learner without a model; its figures are those of all its accelerators together."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    time_scale: float = Field(default=1.0, gt=0)
    """Simulated seconds that pass in one second; as ``engine.simulated.time_scale``."""
    num_parameters: float = Field(default=8.2e9, gt=0)
    """A token takes 6 FLOPs for each; as ``engine.simulated.num_parameters``."""
    bytes_per_parameter: float = Field(default=2.0, gt=0)
    """Of the published weights; as ``engine.simulated.bytes_per_parameter``."""
    flops_per_s: float = Field(default=8 * 989e12, gt=0)
    """Peak FLOP/s at the precision that is trained in."""
    compute_efficiency: float = Field(default=0.4, gt=0, le=1)
    """Share of ``flops_per_s`` that is reached."""
    publish_bytes_per_s: float | None = Field(default=None, gt=0)
    """Bytes/s at which weights go to the store. None: the push takes no time."""

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.bytes_per_parameter
