"""The engine protocol: token-in, token-out generation under a policy version that can change while requests run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "context", "abort"]
"""``stop``: a stop token was sampled (it is the last token). ``length``: max_new_tokens reached. ``context``: the
model's context is full. ``abort``: aborted; what was sampled until then is returned."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float = 1.0
    """Logits are divided by it before the softmax; behaviour logprobs are those of the divided logits. > 0."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit. top_p < 1 and top_k > 0 are refused by engines that would return un-renormalised logprobs."""
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    """Take the most likely token instead of drawing one; behaviour logprobs are still those of ``temperature``."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation: continue ``token_ids``."""

    request_id: str
    trajectory_id: str
    """Key under which the engine keeps the KV of this history between turns (until `release`)."""
    token_ids: np.ndarray
    """int32 [T]: the whole history. The engine reuses the longest prefix it holds for ``trajectory_id``."""
    sampling: SamplingParams
    seed: int
    """Sampling seed. Token number i of the trajectory (position i) is drawn with noise (seed, i), so a trajectory does
    not depend on the batch, the slot or the engine that it ran on."""
    policy: Literal["current", "stale"] = "current"
    """Whose turn it is with cross-policy sampling: for a router; an engine samples under the version that it holds."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one request. The three arrays have one length N."""

    request_id: str
    trajectory_id: str
    token_ids: np.ndarray
    """int32 [N]"""
    logprobs: np.ndarray
    """float32 [N]: behaviour log-probabilities, after temperature."""
    versions: np.ndarray
    """int32 [N]: policy version under which each token was sampled (non-decreasing)."""
    finish_reason: FinishReason
    engine: str = ""
    hardware_class: str = ""
    cached_tokens: int = 0
    """Tokens of the history whose KV was reused."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    stale_tokens: int = 0
    """How many of them stale engines sampled (cross-policy sampling); for a router to say."""
    error: str | None = None
    """Not None: the engine failed on this request (the arrays hold what was sampled until then)."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one weight load cost this engine. Exposed time is what rollouts lost; total includes prefetch."""

    version: int
    exposed_s: float
    total_s: float
    num_bytes: int
    """Of the version's tensors as published: the policy's, or its adapter's."""
    recomputed_tokens: int = 0
    """Tokens of running histories whose KV became invalid (recomputed lazily, when they next generate)."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    engine: str
    hardware_class: str
    version: int
    suspended: bool
    num_running: int
    num_waiting: int
    num_slots: int
    generated_tokens: int
    """Since the start."""
    prefilled_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    """Tokens prefilled again because their KV was of an older version."""
    busy_s: float
    prefill_s: float
    decode_s: float
    extra: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """One replica. All methods may be called from any event loop of the process that hosts it; nothing blocks a loop.

    `suspend` stops at the next decode step: running requests keep their state and go on after `resume`; requests that
    arrive meanwhile wait, and none is lost. `load` is legal only while suspended. KV of running or kept histories of an
    older version is never used to sample under a newer one: it is recomputed when the history next generates.
    """

    async def generate(self, request: GenerateRequest) -> Generation:
        """Complete one request. Raises EngineFailure when the engine is dead or the request is malformed."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request at the next step; its `generate` returns with finish_reason ``abort``. Unknown ids: no-op."""
        ...

    async def release(self, trajectory_id: str) -> None:
        """Drop the KV kept for a trajectory. Unknown ids: no-op."""
        ...

    async def prefetch(self, version: int) -> None:
        """Fetch a published version's weights beside the ones in use, while serving."""
        ...

    async def suspend(self) -> None: ...

    async def load(self, version: int) -> LoadReport:
        """Switch to a published version (a pointer swap when prefetched)."""
        ...

    async def resume(self) -> None: ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End the engine. Requests still running fail with EngineFailure."""
        ...
