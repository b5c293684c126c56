"""The back ends that the engine contract runs on. A further back end adds a factory here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resources.engines.config import EngineConfig
from resources.engines.exchange import HostedEngine
from resources.engines.local import LocalEngine
from resources.engines.simulated import SimulatedEngine
from resources.engines.simulated_config import SimulatedConfig, SimulatedHardware
from tests.model_directories import PublishedVersions

CONTEXT_LENGTH = 512
NUM_SLOTS = 8
UNPUBLISHED_VERSION = -1


@dataclass(frozen=True)
class Backend:
    name: str
    build: Callable[[Path, int], HostedEngine]
    """(model directory, first version) -> an engine with the sizes above, over `PublishedVersions`."""
    kill: Callable[[HostedEngine], None]
    """Make the engine die of itself, as after an error in its own loop."""


def build_local(directory: Path, version: int) -> HostedEngine:
    config = EngineConfig(num_slots=NUM_SLOTS, context_length=CONTEXT_LENGTH, max_prefill_tokens_per_step=128)
    return LocalEngine("engine-0", "compute", PublishedVersions(directory), version, config)


def kill_local(engine: HostedEngine) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of cheese")

    assert isinstance(engine, LocalEngine)
    engine._stepper.forward.logits = fail  # pyright: ignore[reportAttributeAccessIssue]


def build_simulated(directory: Path, version: int) -> HostedEngine:
    """A step takes about a millisecond, so that hundreds of tokens leave time to look while they are sampled."""
    accelerator = SimulatedHardware(flops_per_s=2e14, bytes_per_s=1e12, memory_bytes=8e9, bandwidth_efficiency=1.0)
    simulated = SimulatedConfig(num_parameters=5e8, kv_bytes_per_token=1000, hardware={"compute": accelerator})
    config = EngineConfig(
        backend="simulated",
        num_slots=NUM_SLOTS,
        context_length=CONTEXT_LENGTH,
        max_prefill_tokens_per_step=128,
        simulated=simulated,
    )
    return SimulatedEngine("engine-0", "compute", PublishedVersions(directory), version, config)


def kill_simulated(engine: HostedEngine) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of cheese")

    assert isinstance(engine, SimulatedEngine)
    engine._batch.advance = fail  # pyright: ignore[reportAttributeAccessIssue]


BACKENDS = [Backend("local", build_local, kill_local), Backend("simulated", build_simulated, kill_simulated)]
