from __future__ import annotations

import pytest
from pydantic import ValidationError

from resources.rewards.config import RewardsConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lease": 5}, "Extra inputs are not permitted"),
        ({"min_replicas": 3, "max_replicas": 2}, r"rewards.min_replicas is 3; it must be at most max_replicas \(2\)"),
        ({"busy_poll_s": 1.0}, r"rewards.busy_poll_s is 1.0; it must be at most idle_poll_s \(0.25\)"),
        ({"lease_s": 0.5}, "rewards.lease_s is 0.5; it must be at least 3 x idle_poll_s"),
        ({"keep_alive_s": 0.2}, "rewards.keep_alive_s is 0.2; it must be longer than idle_poll_s"),
        ({"keep_alive_s": 4000}, "rewards.keep_alive_s is 4000.0; it must be at most max_lifetime_s"),
        ({"owner_timeout_s": 5}, r"rewards.owner_timeout_s is 5.0; it must be at least 3 x heartbeat_s \(2.0\)"),
        ({"replica_timeout_s": 5}, "rewards.replica_timeout_s is 5.0; it must be at least 3 x heartbeat_s"),
        ({"work_pool": "{{ $REWARD_POOL }}"}, "work_pool"),
        ({"deployment": "serverless"}, "deployment"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        RewardsConfig(**fields)


def test_a_keep_alive_below_two_iterations_is_warned_about():
    config = RewardsConfig(keep_alive_s=10)
    assert config.keep_alive_warning(5.0) is None
    assert config.keep_alive_warning(5.1) == (
        "rewards.keep_alive_s is 10, less than twice the measured iteration (5.1 s): replicas may end between "
        "iterations and start cold again. Raise it to 10 or more"
    )
