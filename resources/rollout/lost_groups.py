"""A family loses more groups than a batch may cost: which error ends the run, and what does it advise?

Three causes, three counters, three limits: groups without signal end a run (``max_replaced_groups``), an outage of what
is outside the policy is waited out unless ``max_failed_groups`` says otherwise, and so are stale groups
(``max_stale_groups``).
"""

from __future__ import annotations

from collections.abc import Mapping

from resources.failures import RollartError
from resources.rollout.config import RolloutConfig
from resources.rollout.gate_events import TooManyLost


class SignalLost(RollartError):
    """The policy's groups carry no signal: every reward of a group is equal, again and again."""


class GroupsFail(RollartError):
    """Groups fail for reasons outside the policy, again and again."""


class GroupsStale(RollartError):
    """Groups are too old before they can be trained, again and again."""


def error_of(lost: TooManyLost, config: RolloutConfig, last_failures: Mapping[str, str]) -> RollartError:
    """The error, with its cause, its limit and the remedy."""
    family, number = lost.family, lost.number
    match lost.cause:
        case "dead":
            return SignalLost(
                f"family {family!r}: {number} groups had equal rewards in all members and were replaced, more than "
                f"rollout.max_replaced_groups ({config.max_replaced_groups}) allows for one batch; the policy gets no "
                "signal there (too easy, hopeless, or a scorer that always says the same)"
            )
        case "failed":
            last = last_failures.get(family, "not known")
            return GroupsFail(
                f"family {family!r}: {number} groups could not get enough scored members, more than "
                f"rollout.max_failed_groups ({config.max_failed_groups}) allows for one batch; the last failure: "
                f"{last}. Mend what fails, or set rollout.max_failed_groups to null to wait an outage out"
            )
        case "stale":
            return GroupsStale(
                f"family {family!r}: {number} groups were beyond the staleness bound before they could be trained, "
                f"more than rollout.max_stale_groups ({config.max_stale_groups}) allows for one batch; its episodes "
                f"take longer than rollout.max_staleness ({config.max_staleness}) updates: raise it, or set "
                "rollout.stale_policy to 'finish_masked'"
            )
