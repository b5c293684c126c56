"""Corrections at their edges: bounds belong to the range, ties go together, nothing overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tasks.training.algorithm_config import CorrectionConfig
from tasks.training.corrections.base import CorrectionInputs
from tasks.training.plugins import CORRECTIONS, WEIGHTING_CORRECTIONS, resolve


def weights(log_ratios: list[float], **config: Any) -> list[float]:
    settings = CorrectionConfig(**config)
    correction = resolve("training.corrections.name", settings.name, CORRECTIONS)(settings)
    num_tokens = len(log_ratios)
    return correction.weights(
        CorrectionInputs(torch.tensor(log_ratios), torch.zeros(num_tokens).long(), torch.zeros(num_tokens).long(), 1)
    ).tolist()


@pytest.mark.parametrize("name", ["masked_weight", "ratio_mask"])
@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (0.5, 1.0)])
def test_a_weight_on_its_bound_is_inside(name: str, low: float, high: float) -> None:
    """Every token that the learner itself sampled has weight 1."""
    assert weights([0.0, 0.0], name=name, low=low, high=high) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("log_ratios", "kept"),
    [
        ([0.1, 0.3, -0.3], [1.0, 0.0, 0.0]),  # means of squares 0.01, 0.05, 0.063: one of the equal two would fit
        ([0.1, 0.3, -0.31], [1.0, 1.0, 0.0]),
        ([0.0, 0.0], [1.0, 1.0]),
        ([5.0, -5.0], [0.0, 0.0]),
        ([], []),
    ],
)
def test_m2po_masks_tokens_of_equal_size_together(log_ratios: list[float], kept: list[float]) -> None:
    assert weights(log_ratios, name="m2po", second_moment=0.055) == kept


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "staleness_mask"])
@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean"])
def test_weights_are_finite_and_not_negative_however_far_policies_are_apart(name: str, level: str) -> None:
    levels = {} if name == "m2po" else {"level": level}
    for log_ratios in ([300.0, -1e4, 0.0], [300.0, 300.0], [-1e4, -300.0]):
        found = torch.tensor(weights(log_ratios, name=name, **levels))
        assert torch.isfinite(found).all() and (found >= 0).all()
        assert name in WEIGHTING_CORRECTIONS or set(found.tolist()) <= {0.0, 1.0}
