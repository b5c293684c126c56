"""Rollout configuration: combinations that would not work are refused with the remedy."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from resources.rollout.config import RolloutConfig


def test_the_default_is_asynchronous_with_one_version_of_lag():
    config = RolloutConfig()
    assert (config.pipeline, config.max_staleness, config.stale_policy) == ("asynchronous", 1, "evict")


def test_synchronous_is_exactly_staleness_zero():
    assert RolloutConfig(pipeline="synchronous", max_staleness=0).max_staleness == 0
    with pytest.raises(ValidationError, match="set rollout.max_staleness to 0"):
        RolloutConfig(pipeline="synchronous", max_staleness=2)
    with pytest.raises(ValidationError, match="set rollout.pipeline to 'synchronous'"):
        RolloutConfig(max_staleness=0)


def test_waits_that_contradict_each_other_are_refused():
    with pytest.raises(ValidationError, match="exchange_wait_s .4.0. must be at most half of rollout.worker_timeout_s"):
        RolloutConfig(exchange_wait_s=4.0, worker_timeout_s=5.0)
    with pytest.raises(ValidationError, match="stall_limit_s"):
        RolloutConfig(stall_after_s=10.0, stall_limit_s=5.0)


def test_a_share_window_needs_room_for_late_groups():
    assert RolloutConfig(share_window=4).share_slack == 1
    with pytest.raises(ValidationError, match=r"share_window is 4, .* set rollout.share_window to null, or .* to 1 or"):
        RolloutConfig(share_window=4, pipeline="synchronous", max_staleness=0)
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        RolloutConfig(share_window=1)


def test_unknown_keys_are_errors():
    with pytest.raises(ValidationError, match="max_stalenes"):
        RolloutConfig.model_validate({"max_stalenes": 1})


def test_a_schedule_in_logical_time_refuses_what_depends_on_the_moment():
    for changes in (dict(deterministic=True), dict(pipeline="one_off")):
        with pytest.raises(ValidationError, match="set rollout.share_window to null"):
            RolloutConfig(share_window=4, **changes)
    with pytest.raises(ValidationError, match="set rollout.curriculum to null"):
        RolloutConfig(deterministic=True, curriculum="informative_prompts")
    with pytest.raises(ValidationError, match="exactly one version old"):
        RolloutConfig(pipeline="one_off", max_staleness=2)
