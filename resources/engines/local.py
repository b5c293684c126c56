"""The local engine: torch, continuous batching, KV kept per trajectory. The default back end on a CPU.

Coroutines here only hand over to the step thread (`local_thread`) and await its answer; weights are fetched and fused
on a thread of their own. The other files: `local_layout` which model, `local_weights` fused how, `local_forward` one
pass, `local_sampling` which token, `local_slots` which slot, `local_stepper` one step.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from resources.engines.base import EngineStats, GenerateRequest, Generation, LoadReport
from resources.engines.config import EngineConfig
from resources.engines.local_forward import LocalForward
from resources.engines.local_invariant import InvariantForward, check_invariance, sample_tokens_in_blocks
from resources.engines.local_layout import ModelLayout, read_layout
from resources.engines.local_sampling import sample_tokens
from resources.engines.local_slots import SlotTable
from resources.engines.local_stepper import Stepper, Ticket
from resources.engines.local_thread import StepThread
from resources.engines.local_weights import FusedWeights, WeightSource, fuse_weights
from resources.engines.request_checks import checked_request
from resources.failures import DeadlineExceeded, EngineFailure

KV_SHARE_OF_MEMORY = 0.8
"""The KV cache may take this share of the device's memory."""


@dataclass(frozen=True, slots=True)
class _Fetched:
    weights: FusedWeights
    num_bytes: int
    """Of the version's tensors as published."""
    took_s: float


class LocalEngine:
    """Implements `resources.engines.base.Engine`. Construction blocks until the weights are loaded."""

    def __init__(
        self,
        name: str,
        hardware_class: str,
        weights: WeightSource,
        version: int,
        config: EngineConfig,
        *,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        """Raises ValueError for a model or a size that cannot be run, naming the setting."""
        self.name = name
        self.hardware_class = hardware_class
        self._source = weights
        self._config = config
        self._device = device
        self._layout = read_layout(Path(str(weights.policy_directory(version))))
        context_length = _context_length(config, self._layout)
        _check_memory(config, self._layout, context_length, device)
        self._fetcher = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=f"weights-{name}", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._fetches: dict[int, Future[_Fetched]] = {}
        first = self._start_fetch(version).result()
        forward_class = InvariantForward if config.batch_invariant else LocalForward
        forward = forward_class(self._layout, config.num_slots, context_length, device)
        if config.batch_invariant:
            check_invariance(forward, first.weights)
        self._stepper = Stepper(
            forward=forward,
            weights=first.weights,
            table=SlotTable(config.num_slots, context_length, config.prefix_cache),
            max_prefill_tokens=config.max_prefill_tokens_per_step,
            engine=name,
            hardware_class=hardware_class,
            sample=sample_tokens_in_blocks if config.batch_invariant else sample_tokens,
        )
        self._fetches.clear()
        self._thread = StepThread(self._stepper, threads)

    @property
    def version(self) -> int:
        """Version under which the next token is sampled."""
        return self._stepper.weights.version

    @property
    def suspended(self) -> bool:
        return self._thread.suspended

    @property
    def failure(self) -> str | None:
        """Why the engine can answer no request any more; None while it lives."""
        return self._thread.failure

    @property
    def num_free(self) -> int:
        """Slots without a running request, less the requests that wait for one; 0 or less when the engine is full."""
        return self._config.num_slots - self._thread.num_running - self._thread.num_waiting

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`. Cancelling the coroutine aborts the request."""
        request = checked_request(request, self._layout.vocab_size)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._thread.submit(Ticket(request, self._thread.answer_to(future), submitted_at=time.perf_counter()))
        try:
            return await future
        except asyncio.CancelledError:
            self._thread.abort(request.request_id)
            raise

    async def abort(self, request_id: str) -> None:
        self._thread.abort(request_id)

    async def release(self, trajectory_id: str) -> None:
        self._thread.release(trajectory_id)

    async def prefetch(self, version: int) -> None:
        """Fetch and fuse beside the weights in use. Raises EngineFailure when the version cannot be fetched."""
        if version != self.version:
            await self._fetch(version)

    async def suspend(self) -> None:
        await self._settled(self._thread.suspend, "suspend")

    async def load(self, version: int) -> LoadReport:
        """See `Engine.load`. Raises EngineFailure when not suspended, or when the version cannot be fetched; the engine
        then still holds the version that it had."""
        started_at = time.perf_counter()
        if not self.suspended:
            raise EngineFailure(f"engine {self.name}: load of version {version} while it serves; suspend it first")
        if version == self.version:
            return LoadReport(version, exposed_s=0.0, total_s=0.0, num_bytes=0)
        prefetched = version in self._fetches and self._fetches[version].done()
        fetched = await self._fetch(version)
        recomputed = await self._settled(lambda done: self._thread.switch(fetched.weights, done), "load")
        self._fetches = {other: fetch for other, fetch in self._fetches.items() if other > version}
        exposed_s = time.perf_counter() - started_at
        return LoadReport(
            version=version,
            exposed_s=exposed_s,
            total_s=exposed_s + (fetched.took_s if prefetched else 0.0),
            num_bytes=fetched.num_bytes,
            recomputed_tokens=recomputed,
        )

    async def resume(self) -> None:
        await self._settled(self._thread.resume, "resume")

    async def stats(self) -> EngineStats:
        """Raises EngineFailure when the engine is dead."""
        if self._thread.failure is not None:
            raise EngineFailure(self._thread.failure)
        return self._stepper.counters.stats(
            engine=self.name,
            hardware_class=self.hardware_class,
            version=self.version,
            suspended=self.suspended,
            num_running=self._thread.num_running,
            num_waiting=self._thread.num_waiting,
            num_slots=self._config.num_slots,
        )

    async def close(self) -> None:
        self._thread.close()
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        timeout_s = self._config.control_timeout_s
        if not await asyncio.to_thread(self._thread.join, timeout_s):
            raise DeadlineExceeded(f"engine {self.name}: its step thread did not end within {timeout_s} s")

    def _start_fetch(self, version: int) -> Future[_Fetched]:
        if version not in self._fetches:
            self._fetches[version] = self._fetcher.submit(self._fetch_and_fuse, version)
        return self._fetches[version]

    def _fetch_and_fuse(self, version: int) -> _Fetched:
        started_at = time.perf_counter()
        weights = fuse_weights(self._layout, self._source.fetch(version), version, self._device)
        return _Fetched(weights, self._source.num_bytes(version), time.perf_counter() - started_at)

    async def _fetch(self, version: int) -> _Fetched:
        try:
            return await asyncio.wrap_future(self._start_fetch(version))
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            self._fetches.pop(version, None)
            raise EngineFailure(f"engine {self.name}: version {version} cannot be fetched: {error}") from error

    async def _settled(self, command: Any, what: str) -> Any:
        """Hand a command to the step thread and await its answer, within the deadline."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        command(done)
        timeout_s = self._config.control_timeout_s
        try:
            return await asyncio.wait_for(done, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"engine {self.name}: its step thread did not take up {what} within {timeout_s} s"
            ) from None


def _context_length(config: EngineConfig, layout: ModelLayout) -> int:
    if config.context_length is not None and config.context_length > layout.max_positions:
        raise ValueError(
            f"engine.context_length is {config.context_length}, the model was built for {layout.max_positions} "
            "positions (max_position_embeddings); lower it, or leave it out"
        )
    return config.context_length or layout.max_positions


def _check_memory(config: EngineConfig, layout: ModelLayout, context_length: int, device: str) -> None:
    needed = 8 * layout.num_layers * layout.num_kv_heads * layout.head_dim * config.num_slots * context_length
    if torch.device(device).type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = psutil.virtual_memory().total
    if needed > KV_SHARE_OF_MEMORY * total:
        raise ValueError(
            f"engine.num_slots is {config.num_slots} and engine.context_length is {context_length}: their KV cache "
            f"needs {needed / 2**30:.1f} GiB, {device} has {total / 2**30:.1f} GiB; lower one of them"
        )
