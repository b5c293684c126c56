"""Which back end generates, and how much it holds at once."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from resources.engines.base import SamplingParams
from resources.engines.simulated_config import SimulatedConfig

BACKENDS = ("local", "simulated")
PrefixCache = Literal["off", "trajectory", "shared"]


class EngineConfig(BaseModel):
    """One generation engine; every engine of a run is built from the same configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    backend: str = "local"
    """``local``: torch, continuous batching with a KV cache per slot. ``simulated``: no model; generation takes the
    time that the figures of ``simulated`` imply, for load tests, fault tests and what-if runs."""
    num_slots: int = Field(default=64, ge=1, le=4096)
    """Histories whose KV is kept, and requests that run at once. Further requests wait in order of arrival."""
    context_length: int | None = Field(default=None, ge=16)
    """Tokens of one history, at most. None: what the model was built for (``max_position_embeddings``)."""
    max_prefill_tokens_per_step: int = Field(default=1024, ge=1)
    """History tokens computed in one step, at most, so that running requests go on and a suspend is quick; longer
    histories are computed over several steps."""
    prefix_cache: PrefixCache = "shared"
    """Which KV a request may start from. ``off``: none. ``trajectory``: what earlier turns of its own trajectory left.
    ``shared``: also that of any other history with the same beginning, such as the prompt of a group's siblings."""
    batch_invariant: bool = False
    """Compute every history alike, bit by bit, whoever its neighbours in the batch are (``local`` only). Slower: a
    prefill takes about twice as long. Tried out on the machine at the start, refused where it does not hold."""
    control_timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait, in seconds, for a step to end, so that a suspend, load, resume or close is taken up."""
    simulated: SimulatedConfig | None = None
    """Figures, answers and faults of simulated engines; null: the defaults. Only with ``backend: simulated``."""

    @field_validator("backend")
    @classmethod
    def _backend_is_known(cls, value: str) -> str:
        if value not in BACKENDS:
            raise ValueError(f"engine.backend is {value!r}; allowed: {list(BACKENDS)}")
        return value

    @model_validator(mode="after")
    def _simulation_is_wanted(self) -> EngineConfig:
        if self.simulated is not None and self.backend != "simulated":
            raise ValueError(
                f"engine.simulated is given (figures, faults), but engine.backend is {self.backend!r}, which would "
                "ignore it; set engine.backend to 'simulated', or leave engine.simulated out"
            )
        return self

    @property
    def simulation(self) -> SimulatedConfig:
        """What simulated engines pretend to be."""
        return self.simulated or SimulatedConfig()


def check_sampling(sampling: SamplingParams) -> None:
    """Raise ValueError for sampling whose behaviour logprobs the local engine could not report rightly."""
    if not sampling.temperature > 0:
        raise ValueError(
            f"temperature is {sampling.temperature}; it must be above 0 (use greedy for the likeliest token)"
        )
    if sampling.top_p != 1.0:
        raise ValueError(
            f"top_p is {sampling.top_p}; only 1.0 is allowed: the logprobs of a truncated distribution are not those "
            "the learner computes, so its importance ratios would be wrong"
        )
    if sampling.top_k != 0:
        raise ValueError(
            f"top_k is {sampling.top_k}; only 0 (no limit) is allowed: the logprobs of a truncated distribution are "
            "not those the learner computes, so its importance ratios would be wrong"
        )
    if sampling.max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}; it must be 0 or more")
