"""Engine settings: what cannot be built or would be ignored is refused when the run file is read."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from resources.engines.config import EngineConfig
from resources.engines.simulated_config import Fault, ScriptedAnswers, SimulatedConfig, SimulatedHardware


def test_an_unknown_backend_is_refused_at_load() -> None:
    with pytest.raises(ValidationError, match=r"engine\.backend is 'locl'; allowed: \['local', 'simulated'\]"):
        EngineConfig(backend="locl")


def test_a_simulation_is_refused_for_other_back_ends() -> None:
    faults = {"faults": [{"kind": "crash", "after_s": 1.0}]}
    with pytest.raises(ValidationError, match="engine.backend is 'local', which would ignore it; set engine.backend"):
        EngineConfig.model_validate({"simulated": faults})
    assert len(EngineConfig.model_validate({"backend": "simulated", "simulated": faults}).simulation.faults) == 1
    assert EngineConfig(backend="simulated").simulation == SimulatedConfig()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "hang"}, "has the triggers none; give exactly one of after_requests, after_s, probability"),
        ({"kind": "hang", "after_s": 1, "after_requests": 2}, "give exactly one of"),
        ({"kind": "crash", "after_s": 1, "duration_s": 2}, "duration_s is 2 for a 'crash', which is final"),
        ({"kind": "slow", "after_s": 1}, "factor is None for a 'slow' fault; 'slow' needs one above 1"),
        ({"kind": "hang", "after_s": 1, "factor": 3}, "factor is 3.0 for a 'hang' fault"),
        ({"kind": "hang", "after_s": 1, "engine": "a-0", "hardware_class": "a"}, "leave hardware_class out"),
        ({"kind": "melt", "after_s": 1}, "'slow', 'hang', 'crash' or 'wrong_version'"),
        ({"kind": "hang", "probability": 1.5}, "less than or equal to 1"),
    ],
)
def test_a_fault_that_means_nothing_is_refused(fault: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Fault.model_validate(fault)


def test_faults_survive_being_written_and_read_again() -> None:
    """A flow's parameters are dumped with every default."""
    faults = (Fault(kind="slow", after_s=0, factor=2.0), Fault(kind="crash", engine="compute-0", after_requests=3))
    config = EngineConfig(backend="simulated", simulated=SimulatedConfig(faults=faults))
    assert EngineConfig.model_validate(config.model_dump(mode="json")) == config


def test_figures_that_do_not_go_together_are_refused() -> None:
    small = SimulatedHardware(flops_per_s=1e12, bytes_per_s=1e12, memory_bytes=20e9)
    with pytest.raises(ValidationError, match=r"hardware\.compute\.memory_bytes is 2e\+10, too little for weights"):
        SimulatedConfig(hardware={"compute": small})
    one_copy = small.model_copy(update={"swap_bytes_per_s": 1e10})
    assert SimulatedConfig(hardware={"compute": one_copy}).kv_capacity_tokens("compute") > 0
    with pytest.raises(ValueError, match=r"no figures for hardware class 'tpu'; it has \['bandwidth', 'compute'\]"):
        SimulatedConfig().of_class("tpu")
    with pytest.raises(ValidationError, match="at least two ids between them"):
        ScriptedAnswers(token_ids=(5, 6))
