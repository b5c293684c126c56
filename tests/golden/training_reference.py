"""Writes training.json: advantages, losses and gradients in float64, from closed forms.

Written apart from the implementation: plain Python, no tensor library, nothing imported from it. Run it again with
``python tests/golden/training_reference.py`` after changing a case.
"""

import json
import math
import random
from pathlib import Path


def group_advantages(rewards, scaling, epsilon):
    """(r - mean) / (population deviation + epsilon); None stays out and gets 0; no spread gives 0."""
    seen = [r for r in rewards if r is not None]
    if len(seen) < 2 or max(seen) == min(seen):
        return [0.0 for _ in rewards]
    mean = sum(seen) / len(seen)
    deviation = math.sqrt(sum((r - mean) * (r - mean) for r in seen) / len(seen))
    divisor = deviation + epsilon if scaling == "group" else 1.0
    return [0.0 if r is None else (r - mean) / divisor for r in rewards]


def clipped_token(current, reference, advantage, low, high):
    """Value and derivative by `current` of -min(u A, clip(u) A), u = exp(current - reference)."""
    u = math.exp(current - reference)
    bounded = min(max(u, 1 - low), 1 + high)
    if u * advantage <= bounded * advantage:
        return -u * advantage, -u * advantage, False
    return -bounded * advantage, 0.0, True


def ppo_clip(case):
    values, gradients, clipped = [], [], []
    for c, b, a in zip(case["current"], case["behaviour"], case["advantages"], strict=True):
        value, gradient, is_clipped = clipped_token(c, b, a, case["clip_low"], case["clip_high"])
        values.append(value)
        gradients.append(gradient)
        clipped.append(is_clipped)
    return {"values": values, "gradients": gradients, "clipped": clipped}


def decoupled(case):
    values, gradients, clipped = [], [], []
    for i, (c, p, b, a) in enumerate(
        zip(case["current"], case["proximal"], case["behaviour"], case["advantages"], strict=True)
    ):
        siblings = [j for j, s in enumerate(case["sequence"]) if s == case["sequence"][i]]
        logs = [case["proximal"][j] - case["behaviour"][j] for j in siblings]
        exponent = {"token": p - b, "sequence_sum": sum(logs), "sequence_mean": sum(logs) / len(logs)}[case["level"]]
        weight = min(math.exp(exponent), case["cap"])
        value, gradient, is_clipped = clipped_token(c, p, a, case["clip_low"], case["clip_high"])
        values.append(weight * value)
        gradients.append(weight * gradient)
        clipped.append(is_clipped)
    return {"values": values, "gradients": gradients, "clipped": clipped}


def token_case(rng, **extra):
    sequence = [0] * 3 + [1] * 5 + [2] * 4
    current = [-rng.uniform(0.05, 4.0) for _ in sequence]
    return {
        "current": current,
        "behaviour": [c + rng.gauss(0.0, 0.4) for c in current],
        "proximal": [c + rng.gauss(0.0, 0.3) for c in current],
        "advantages": [rng.gauss(0.0, 1.0) for _ in sequence],
        "sequence": sequence,
        "clip_low": 0.2,
        "clip_high": 0.28,
        **extra,
    }


def all_cases():
    rng = random.Random(20240817)
    groups = [
        [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.9],
        [0.35] * 7 + [0.0],
        [1.0, 1.0, None, 0.0],
        [None, -1.0, -1.0, -1.0],
        [2.0, 2.0, 2.0, 2.0],
        [-0.1, 0.9, 1.0],
    ]
    return {
        "grpo": [
            {"rewards": g, "scaling": s, "epsilon": 1e-4, "advantages": group_advantages(g, s, 1e-4)}
            for g in groups
            for s in ("group", "none")
        ],
        "ppo_clip": [{**(case := token_case(rng)), **ppo_clip(case)} for _ in range(3)],
        "decoupled": [
            {**(case := token_case(rng, cap=cap, level=level)), **decoupled(case)}
            for level in ("token", "sequence_sum", "sequence_mean")
            for cap in (1.1, 2.0)
        ],
    }


def main():
    Path(__file__).with_name("training.json").write_text(json.dumps(all_cases(), indent=1) + "\n")


if __name__ == "__main__":
    main()
