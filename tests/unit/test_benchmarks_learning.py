"""Runs of different staleness bounds, compared seed by seed."""

from __future__ import annotations

import pytest

from benchmarks.staleness_cost import compare_with_synchronous, lag_shares, paired_difference, staleness_headline


def run(seed: int, bound: int, mean: float, iteration_s: float, **lags: float) -> dict:
    return {"seed": seed, "max_staleness": bound, "mean": mean, "iteration_s": iteration_s, **lags}


def test_an_interval_is_that_of_the_differences_not_of_the_values():
    far_apart, shifted = [0.1, 0.5, 0.9], [0.09, 0.49, 0.89]
    assert paired_difference(far_apart, shifted) == pytest.approx((0.01, 0.01, 0.01))
    # Differences 0, 1, 2: standard deviation 1, t of 2 degrees of freedom 4.303.
    mean, low, high = paired_difference([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    assert (mean, low, high) == pytest.approx((1.0, 1 - 4.303 / 3**0.5, 1 + 4.303 / 3**0.5))
    assert paired_difference([1.0], [0.5]) == (0.5, None, None)


@pytest.mark.parametrize(("first", "second"), [([], []), ([1.0], [1.0, 2.0]), ([0.0] * 17, [0.0] * 17)])
def test_what_is_no_pairing_is_refused(first, second):
    with pytest.raises(ValueError, match="pairs"):
        paired_difference(first, second)


def test_lag_shares_are_of_all_batches_and_show_the_bound_that_was_never_reached():
    rows = [{"staleness/lag_histogram": {"0": 3, "1": 1}}, {"staleness/lag_histogram": {"1": 4}}]
    assert lag_shares(rows, 2) == {"lag_0": 3 / 8, "lag_1": 5 / 8, "lag_2": 0.0}
    assert lag_shares([{"staleness/lag_histogram": {}}], 1) == {}


def test_each_seed_is_compared_with_its_own_synchronous_run():
    runs = [run(0, 0, 0.9, 2.0), run(1, 0, 0.7, 3.0), run(0, 1, 0.88, 1.0, lag_1=1.0), run(1, 1, 0.68, 1.0, lag_1=0.5)]
    synchronous, other = compare_with_synchronous(runs)
    assert (synchronous["loss_of_success"], synchronous["speedup"]) == (0.0, 1.0)
    assert other["loss_of_success"] == pytest.approx(0.02) and other["loss_low"] == pytest.approx(0.02)
    assert (other["speedup"], other["lag_1"]) == (2.5, 0.75)
    headline = staleness_headline([synchronous, other])
    assert list(headline) == ["loss_of_success_at_1", "loss_low_at_1", "loss_high_at_1", "speedup_at_1"]


def test_a_seed_without_its_partner_is_refused():
    with pytest.raises(ValueError, match="every seed"):
        compare_with_synchronous([run(0, 0, 0.9, 1.0), run(1, 1, 0.9, 1.0)])
