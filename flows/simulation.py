"""A simulated run: do its parts pretend to be the same thing?"""

from __future__ import annotations

from pathlib import Path

from flows.config import RunConfig

SHARED = ("time_scale", "num_parameters", "bytes_per_parameter")
"""What engines and learner must agree on."""


def check_simulation(config: RunConfig) -> None:
    """Raises ValueError, naming the fields, their values and the remedy."""
    engine, training = config.engine, config.training
    if (engine.backend == "simulated") != (training.backend == "simulated"):
        raise ValueError(
            f"engine.backend is {engine.backend!r} and training.backend is {training.backend!r}: what a simulated "
            "engine samples is nothing to train on, and what a simulated learner publishes is nothing to sample from; "
            "set both to 'simulated', or neither"
        )
    if engine.backend != "simulated":
        return
    for field in SHARED:
        ours, theirs = getattr(engine.simulation, field), getattr(training.simulation, field)
        if ours != theirs:
            raise ValueError(
                f"engine.simulated.{field} is {ours:g} and training.simulated.{field} is {theirs:g}: they are one "
                "policy on one clock; set both to the same"
            )
    engine_classes = config.pools.of_role("engine")
    for name in engine_classes:
        engine.simulation.of_class(name)
    for fault in engine.simulation.faults:
        _check_target(config, fault.hardware_class, fault.engine, engine_classes)
    directory = config.policy.model_directory
    if engine.context_length is None and directory is not None and not (Path(directory) / "config.json").is_file():
        raise ValueError(
            f"engine.context_length is not given, and policy.model_directory {directory!r} has no config.json that "
            "names max_position_embeddings; set engine.context_length"
        )


def _check_target(config: RunConfig, hardware_class: str | None, engine: str | None, classes: list[str]) -> None:
    """A fault of a class or an engine that does not exist would never come, and the run would look robust."""
    if hardware_class is not None and hardware_class not in classes:
        raise ValueError(
            f"engine.simulated.faults names hardware_class {hardware_class!r}; classes with role 'engine': {classes}"
        )
    if engine is None:
        return
    name, _, index = engine.rpartition("-")
    # A standing cluster says itself how many workers a class has.
    known = config.pools.classes[name].num_workers if name in classes and config.pools.address is None else None
    if name not in classes or not index.isdigit() or (known is not None and int(index) >= known):
        engines = [f"{each}-0 to {each}-{max(0, config.pools.classes[each].num_workers - 1)}" for each in classes]
        raise ValueError(f"engine.simulated.faults names engine {engine!r}; engines are called {', '.join(engines)}")
