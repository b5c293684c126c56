"""A simulated run whose parts do not pretend to be the same thing is refused, with the remedy, at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.config import RunConfig, with_overrides
from flows.opening import check_inputs
from flows.simulation import check_simulation
from tests.model_directories import write_tokenizer

SIMULATED = {"engine.backend": "simulated", "training.backend": "simulated"}
FAULT = "engine.simulated.faults"


def config(overrides: dict[str, Any]) -> RunConfig:
    return with_overrides(RunConfig(), {**SIMULATED, **overrides})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.backend": "torch"}, "nothing to train on, .* set both to 'simulated', or neither"),
        ({"engine.backend": "local"}, "nothing to sample from; set both to 'simulated'"),
        ({"engine.simulated.time_scale": 20}, "time_scale is 20 and training.simulated.time_scale is 1"),
        ({"training.simulated.num_parameters": 1e9}, r"num_parameters is 8.2e\+09 and training.* is 1e\+09"),
        (
            {"engine.simulated.hardware": {"compute": dict(flops_per_s=1e12, bytes_per_s=1e12, memory_bytes=8e10)}},
            "no figures for hardware class 'bandwidth'",
        ),
        ({FAULT: [{"kind": "crash", "after_s": 1, "hardware_class": "learner"}]}, "classes with role 'engine'"),
        ({FAULT: [{"kind": "crash", "after_s": 1, "engine": "compute"}]}, "engines are called compute-0 to compute-0"),
        ({FAULT: [{"kind": "crash", "after_s": 1, "engine": "compute-1"}]}, "names engine 'compute-1'"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_simulation(config(overrides))


def test_a_simulation_needs_a_tokenizer_only(tmp_path: Path) -> None:
    policy = {"policy.model_directory": str(write_tokenizer(tmp_path / "policy")), "store": str(tmp_path / "store")}
    with pytest.raises(ValueError, match=r"no config.json that names max_position_embeddings; set engine.context_len"):
        check_inputs(config({**policy, "warm_start": None}))
    check_inputs(config({**policy, "warm_start": None, "engine.context_length": 400}))
    with pytest.raises(ValueError, match="has no config.json"):  # a warm start trains it
        check_inputs(config({**policy, "engine.context_length": 400}))
    with pytest.raises(ValueError, match="has no config.json"):
        check_inputs(with_overrides(RunConfig(), {**policy, "warm_start": None}))
