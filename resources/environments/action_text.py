"""What does an action text say? One tagged action, e.g. ``<act>left</act>``; anything else is malformed."""

from __future__ import annotations

import re

from resources.environments.base import Message, StepOutcome

INVALID_ACTION_PENALTY = -0.1
"""Reward of one malformed action, in every family."""

_ACTION = re.compile(r"\s*<(?P<tag>[a-z]+)>(?P<body>.*)</(?P=tag)>\s*", re.DOTALL)


def parse_action(text: str, tags: tuple[str, ...]) -> tuple[str, str] | None:
    """(tag, stripped body) of an action text that is exactly one of ``tags``; None when it is malformed."""
    match = _ACTION.fullmatch(text)
    if match is None or match["tag"] not in tags:
        return None
    body = match["body"].strip()
    return None if "<" + match["tag"] + ">" in body else (match["tag"], body)


def tagged(tag: str, body: str) -> str:
    """The action text of a body."""
    return f"<{tag}>{body}</{tag}>"


def malformed(
    error: str,
    *,
    role: str = "user",
    terminated: bool = False,
    truncated: bool = False,
    success: bool | None = None,
) -> StepOutcome:
    """The outcome of a malformed action: the error is the observation, the penalty the reward, and the episode goes on.

    With the last turn gone (``terminated`` or ``truncated``) there is nothing to append, and an environment that knows
    the outcome says so in ``success``.
    """
    over = terminated or truncated
    return StepOutcome(
        observation=[] if over else [Message(role=role, content=f"error: {error}")],
        reward=INVALID_ACTION_PENALTY,
        terminated=terminated,
        truncated=truncated,
        success=success,
        invalid_action=True,
        components={"invalid_action": INVALID_ACTION_PENALTY},
    )
