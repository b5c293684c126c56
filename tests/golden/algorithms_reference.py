"""Writes algorithms.json: estimators, losses, corrections, KL estimates and denominators in float64, from closed forms.

Written apart from the implementation: numpy alone, nothing imported from it. Gradients are central differences of the
loss with the constants of each term held fixed. ``python tests/golden/algorithms_reference.py`` writes it anew.
"""

import json
from pathlib import Path

import numpy as np

EPSILON = 1e-4
STEP = 1e-5


def central_difference(function, point):
    """Gradient of the sum of ``function`` at ``point``, one coordinate at a time."""
    gradient = np.zeros_like(point)
    for i in range(len(point)):
        up, down = point.copy(), point.copy()
        up[i] += STEP
        down[i] -= STEP
        gradient[i] = (function(up).sum() - function(down).sum()) / (2 * STEP)
    return gradient


# -- losses: f(current, frozen) with ``frozen`` = the current log-probabilities as constants ---------------------------


def surrogate(ratio, advantage, low, high, dual=None):
    value = -np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None:
        value = np.where(advantage < 0, np.minimum(value, -dual * advantage), value)
    return value


def per_sequence(values, sequence, reduce):
    return np.array([reduce(values[sequence == s]) for s in sequence])


def policy_gradient(c, x, frozen):
    return -x["advantages"] * c


def ppo_dual_clip(c, x, frozen):
    return surrogate(np.exp(c - x["behaviour"]), x["advantages"], 0.2, 0.28, dual=1.5)


def ppo_proximal(c, x, frozen):
    return surrogate(np.exp(c - x["proximal"]), x["advantages"], 0.1, 0.15)


def gspo(c, x, frozen):
    # Each of the |y| tokens of a sequence carries the whole loss of the sequence, whose gradient is spread evenly: in
    # sum that is what GSPO-token gives with one advantage per sequence.
    s = np.exp(per_sequence(c - x["behaviour"], x["sequence"], np.mean))
    return surrogate(s, x["sequence_advantages"], 0.05, 0.08)


def cispo(c, x, frozen):
    return -np.clip(np.exp(frozen - x["behaviour"]), 0.0, 1.28) * x["advantages"] * c


def cispo_bounded(c, x, frozen):
    return -np.clip(np.exp(frozen - x["behaviour"]), 0.9, 1.1) * x["advantages"] * c


def tis(c, x, frozen):
    return -np.minimum(np.exp(frozen - x["behaviour"]), 1.0) * x["advantages"] * c


def topr(c, x, frozen):
    tapered = np.minimum(np.exp(frozen - x["behaviour"]), 1.0)
    return -np.where(x["rewards"] > 0, 1.0, tapered) * x["advantages"] * c


def topr_sequence(c, x, frozen):
    tapered = np.minimum(np.exp(per_sequence(frozen - x["behaviour"], x["sequence"], np.sum)), 1.0)
    return -np.where(x["rewards"] > 0, 1.0, tapered) * x["advantages"] * c


def kimi(c, x, frozen):
    return -(x["advantages"] * c - 0.1 / 2 * (c - x["behaviour"]) ** 2)


def decoupled_loglinear(c, x, frozen):
    proximal = loglinear(x, frozen)
    weight = np.minimum(np.exp(proximal - x["behaviour"]), 2.0)
    return weight * surrogate(np.exp(c - proximal), x["advantages"], 0.2, 0.28)


def loglinear(x, frozen):
    """Staleness s: sampled under v - s, the update makes v + 1 and the proximal policy is v."""
    return x["behaviour"] + x["staleness"] / (x["staleness"] + 1.0) * (frozen - x["behaviour"])


def ppo_loglinear_dual_clip(c, x, frozen):
    return surrogate(np.exp(c - loglinear(x, frozen)), x["advantages"], 0.05, 0.28, dual=1.02)


def decoupled_dual_clip(c, x, frozen):
    weight = np.minimum(np.exp(x["proximal"] - x["behaviour"]), 2.0)
    return weight * surrogate(np.exp(c - x["proximal"]), x["advantages"], 0.2, 0.28, dual=1.1)


def gspo_proximal(c, x, frozen):
    s = np.exp(per_sequence(c - x["proximal"], x["sequence"], np.mean))
    return surrogate(s, x["sequence_advantages"], 0.02, 0.03, dual=1.05)


def cispo_proximal(c, x, frozen):
    return -np.clip(np.exp(frozen - x["proximal"]), 0.0, 1.28) * x["advantages"] * c


def tis_loglinear(c, x, frozen):
    return -np.clip(np.exp(frozen - loglinear(x, frozen)), 0.7, 1.1) * x["advantages"] * c


def topr_proximal(c, x, frozen):
    tapered = np.minimum(np.exp(per_sequence(frozen - x["proximal"], x["sequence"], np.mean)), 1.0)
    return -np.where(x["rewards"] > 1.0, 1.0, tapered) * x["advantages"] * c


def kimi_proximal(c, x, frozen):
    return -x["advantages"] * c + 0.7 / 2 * (c - x["proximal"]) ** 2


PROXIMAL = {"ratio_to": "proximal"}
LOSSES = {
    "policy_gradient": (policy_gradient, {"name": "policy_gradient"}),
    "ppo_dual_clip": (ppo_dual_clip, {"name": "ppo_clip", "dual_clip": 1.5}),
    "ppo_proximal": (
        ppo_proximal,
        {"name": "ppo_clip", "ratio_to": "proximal", "clip_low": 0.1, "clip_high": 0.15},
    ),
    "gspo": (gspo, {"name": "gspo", "clip_low": 0.05, "clip_high": 0.08}),
    "cispo": (cispo, {"name": "cispo"}),
    "cispo_bounded": (cispo_bounded, {"name": "cispo", "clip_low": 0.1, "clip_high": 0.1}),
    "tis": (tis, {"name": "tis"}),
    "topr": (topr, {"name": "topr"}),
    "topr_sequence": (topr_sequence, {"name": "topr", "behaviour_weight_level": "sequence_sum"}),
    "kimi": (kimi, {"name": "kimi"}),
    "decoupled_loglinear": (decoupled_loglinear, {"name": "decoupled", "proximal": "loglinear"}),
    "decoupled_dual_clip": (decoupled_dual_clip, {"name": "decoupled", "dual_clip": 1.1}),
    "ppo_loglinear_dual_clip": (
        ppo_loglinear_dual_clip,
        {"name": "ppo_clip", **PROXIMAL, "proximal": "loglinear", "clip_low": 0.05, "dual_clip": 1.02},
    ),
    "gspo_proximal": (
        gspo_proximal,
        {"name": "gspo", **PROXIMAL, "clip_low": 0.02, "clip_high": 0.03, "dual_clip": 1.05},
    ),
    "cispo_proximal": (cispo_proximal, {"name": "cispo", **PROXIMAL}),
    "tis_loglinear": (
        tis_loglinear,
        {"name": "tis", **PROXIMAL, "proximal": "loglinear", "clip_low": 0.3, "clip_high": 0.1},
    ),
    "topr_proximal": (
        topr_proximal,
        {"name": "topr", **PROXIMAL, "behaviour_weight_level": "sequence_mean", "positive_above": 1.0},
    ),
    "kimi_proximal": (kimi_proximal, {"name": "kimi", **PROXIMAL, "quadratic_penalty": 0.7}),
}


def loss_inputs(rng):
    sequence = np.array([0] * 3 + [1] * 5 + [2] * 4 + [3] * 2)
    current = -rng.uniform(0.05, 4.0, len(sequence))
    return {
        "current": current,
        "behaviour": np.minimum(current + rng.normal(0.0, 0.4, len(sequence)), -0.01),
        "proximal": np.minimum(current + rng.normal(0.0, 0.3, len(sequence)), -0.01),
        "reference": np.minimum(current + rng.normal(0.0, 0.5, len(sequence)), -0.01),
        "advantages": rng.normal(0.0, 1.0, len(sequence)),
        "sequence_advantages": rng.normal(0.0, 1.0, 4)[sequence],
        "rewards": np.array([1.0, -0.2, 0.0, 2.0])[sequence],
        "staleness": rng.integers(0, 4, len(sequence)),
        "sequence": sequence,
    }


def loss_cases(rng):
    cases = []
    for name, (function, config) in LOSSES.items():
        for _ in range(2):
            x = loss_inputs(rng)
            if name.startswith("gspo"):
                x["advantages"] = x["sequence_advantages"]
            values = function(x["current"], x, x["current"])
            gradient = central_difference(lambda c, x=x, f=function: f(c, x, x["current"]), x["current"])
            cases.append({"loss": name, "config": config, **x, "values": values, "gradients": gradient})
    return cases


def kl_cases(rng):
    formulas = {
        "k1": lambda d: d,
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: np.exp(-d) - 1 + d,
    }
    cases = []
    for name, formula in formulas.items():
        x = loss_inputs(rng)
        function = lambda c, x=x, f=formula: f(c - x["reference"])  # noqa: E731
        cases.append(
            {
                "estimator": name,
                "current": x["current"],
                "reference": x["reference"],
                "values": function(x["current"]),
                "gradients": central_difference(function, x["current"]),
            }
        )
    return cases


# -- corrections -------------------------------------------------------------------------------------------------------


def correction_cases(rng):
    x = loss_inputs(rng)
    log_ratio, sequence, staleness = x["proximal"] - x["behaviour"], x["sequence"], x["staleness"]
    token = np.exp(log_ratio)
    total = np.exp(per_sequence(log_ratio, sequence, np.sum))
    geometric = np.exp(per_sequence(log_ratio, sequence, np.mean))
    kept = np.zeros(len(log_ratio))
    order = np.argsort(log_ratio**2)
    for count in range(len(order), 0, -1):
        if np.mean(log_ratio[order[:count]] ** 2) <= 0.04:
            kept[order[:count]] = 1.0
            break
    inside = lambda w, low, high: ((w >= low) & (w <= high)).astype(float)  # noqa: E731
    cases = [
        ({"name": "truncated_weight"}, np.minimum(token, 2.0)),
        ({"name": "truncated_weight", "low": 0.9, "high": 1.1}, np.clip(token, 0.9, 1.1)),
        ({"name": "truncated_weight", "level": "sequence_sum", "high": 1.2}, np.minimum(total, 1.2)),
        ({"name": "truncated_weight", "level": "sequence_mean", "high": 1.02}, np.minimum(geometric, 1.02)),
        ({"name": "masked_weight", "low": 0.8, "high": 1.2}, token * inside(token, 0.8, 1.2)),
        (
            {"name": "masked_weight", "level": "sequence_mean", "low": 0.9, "high": 1.1},
            geometric * inside(geometric, 0.9, 1.1),
        ),
        ({"name": "ratio_mask", "low": 0.8, "high": 1.2}, inside(token, 0.8, 1.2)),
        ({"name": "ratio_mask", "level": "sequence_sum", "low": 0.7, "high": 1.5}, inside(total, 0.7, 1.5)),
        ({"name": "staleness_mask", "max_staleness": 1}, (staleness <= 1).astype(float)),
        ({"name": "m2po"}, kept),
    ]
    return [
        {"config": c, "log_ratio": log_ratio, "staleness": staleness, "sequence": sequence, "weights": w}
        for c, w in cases
    ]


# -- estimators over whole rollouts: rewards by group; None is unscored ------------------------------------------------

GROUPS = [[1.0, 0.0, 0.0, 1.0, 0.5], [2.0, 2.0, 2.0], [0.3, None, -0.4, 0.1], [None, 1.0]]
TOKENS = [[2, 3, 1, 4, 2], [1, 2, 2], [3, 2, 5, 1], [2, 2]]
"""Sampled tokens of each rollout."""


def by_rollout(formula):
    """``formula`` maps the scored rewards of a group to advantages; unscored and dead groups get None."""
    result = []
    for rewards in GROUPS:
        scored = np.array([r for r in rewards if r is not None])
        dead = len(scored) < 2 or np.ptp(scored) == 0
        advantages = iter([] if dead else formula(scored))
        result.append([None if r is None or dead else float(next(advantages)) for r in rewards])
    return result


def whitened(advantages):
    """By rollout, each counting as often as it has tokens."""
    flat = np.concatenate(
        [
            np.full(n, a)
            for group, tokens in zip(advantages, TOKENS, strict=True)
            for a, n in zip(group, tokens, strict=True)
            if a is not None
        ]
    )
    return [[None if a is None else (a - flat.mean()) / flat.std() for a in group] for group in advantages]


def rollout_cases():
    every = np.array([r for group in GROUPS for r in group if r is not None])
    scale = every.std() + EPSILON
    centred = by_rollout(lambda r: r - r.mean())
    rloo = by_rollout(lambda r: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]))
    as_they_are = [[r for r in group] for group in GROUPS]
    normal = by_rollout(lambda r: (r - r.mean()) / (r.std() + EPSILON))
    return [
        {"config": {"estimator": "grpo", "scaling": "group"}, "advantages": normal},
        {
            "config": {"estimator": "grpo", "scaling": "batch"},
            "advantages": by_rollout(lambda r: (r - r.mean()) / scale),
        },
        {"config": {"estimator": "grpo", "scaling": "none"}, "advantages": centred},
        {"config": {"estimator": "rloo"}, "advantages": rloo},
        {"config": {"estimator": "reinforce_plus_plus"}, "advantages": whitened(as_they_are)},
        {"config": {"estimator": "reinforce_plus_plus_baseline"}, "advantages": whitened(centred)},
        {"config": {"estimator": "grpo", "scaling": "none", "normalisation": "batch"}, "advantages": whitened(centred)},
        {"config": {"estimator": "grpo", "normalisation": "family"}, "advantages": whitened(normal)},
    ]


def gdpo_case():
    components = {
        "outcome": np.array([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]),
        "format": np.array([[0.0, -0.1, -0.3, 0.0], [-0.2, 0.0, 0.0, -0.1], [0.0, 0.0, 0.0, 0.0]]),
    }
    weights = {"outcome": 1.0, "format": 0.5}
    total = np.zeros((3, 4))
    for name, r in components.items():
        deviation = r.std(axis=1, keepdims=True)
        part = (r - r.mean(axis=1, keepdims=True)) / (deviation + EPSILON)
        total += weights[name] * np.where(deviation > 0, part, 0.0)
    live = total[:2]  # nothing differs in the third group
    return {
        "components": components,
        "weights": weights,
        "advantages": [*((live - live.mean()) / live.std()), [None] * 4],
    }


# -- estimators by turn and by token -----------------------------------------------------------------------------------


def returns_to_go(rewards, discount):
    return [sum(discount ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


EPISODES = [
    {"states": ["s", "a", "b"], "inline": [0.0, 0.1, 0.0], "final": 1.1},
    {"states": ["s", "a"], "inline": [0.0, -0.1], "final": -0.1},
    {"states": ["s", "c", "a", "a"], "inline": [0.2, 0.0, 0.0, 0.0], "final": 1.2},
]


def episode_rewards():
    """The verdict at the end is what the final reward holds beyond the inline ones."""
    rewards = [list(e["inline"]) for e in EPISODES]
    for r, e in zip(rewards, EPISODES, strict=True):
        r[-1] += e["final"] - sum(e["inline"])
    return rewards


def turn_returns_case(discount):
    returns = [np.array(returns_to_go(r, discount)) for r in episode_rewards()]
    mean = np.mean([r.mean() for r in returns])
    deviation = np.sqrt(np.mean([((r - mean) ** 2).mean() for r in returns]))
    return {"discount": discount, "advantages": [(r - mean) / (deviation + EPSILON) for r in returns]}


def gigpo_case(discount, step_weight):
    finals = np.array([e["final"] for e in EPISODES])
    episode = (finals - finals.mean()) / (finals.std() + EPSILON)
    returns = [returns_to_go(r, discount) for r in episode_rewards()]
    advantages = []
    for i, e in enumerate(EPISODES):
        row = []
        for t, state in enumerate(e["states"]):
            met = np.array(
                [returns[j][k] for j, other in enumerate(EPISODES) for k, s in enumerate(other["states"]) if s == state]
            )
            step = 0.0
            if len(met) > 1 and np.ptp(met) > 0:
                step = (returns[i][t] - met.mean()) / (met.std() + EPSILON)
            row.append(episode[i] + step_weight * step)
        advantages.append(row)
    return {"discount": discount, "step_weight": step_weight, "advantages": advantages}


def gae_case(rng, discount, trace_decay):
    """Turns of 2, 1 and 3 tokens; delta and the sum over later deltas written out term by term."""
    values = rng.normal(0.0, 1.0, 6)
    rewards = np.array([0.0, 0.25, -0.5, 0.0, 0.0, 1.25])  # inline 0.25, -0.5, 0.0; final 1.0
    after = np.append(values[1:], 0.0)
    delta = rewards + discount * after - values
    advantages = [
        sum((discount * trace_decay) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))
    ]
    return {
        "turns": [2, 1, 3],
        "inline": [0.25, -0.5, 0.0],
        "final": 1.0,
        "values": values,
        "discount": discount,
        "gae_lambda": trace_decay,
        "advantages": advantages,
        "returns": np.array(advantages) + values,
    }


# -- critic, denominators ----------------------------------------------------------------------------------------------


def value_loss_case(rng):
    start, returns = rng.normal(0.0, 1.0, 12), rng.normal(0.0, 1.0, 12)
    values = start + rng.normal(0.0, 0.4, 12)

    def loss(v):
        moved = start + np.clip(v - start, -0.2, 0.2)
        return 0.5 * np.maximum((v - returns) ** 2, (moved - returns) ** 2)

    return {
        "values": values,
        "start": start,
        "returns": returns,
        "losses": loss(values),
        "gradients": central_difference(loss, values),
    }


def normaliser_cases():
    tokens, families = np.array([1, 3, 4, 8]), ["maze", "maze", "sums", "code"]
    of_family = {f: sum(n for n, g in zip(tokens, families, strict=True) if g == f) for f in families}
    return {
        "tokens": tokens,
        "families": families,
        "token_mean": np.full(4, 1 / 16),
        "sequence_mean": 1 / (4 * tokens),
        "fixed_length": np.full(4, 1 / (4 * 32)),
        "family_token_mean": [1 / (3 * of_family[f]) for f in families],
    }


def plain(value):
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def all_cases():
    rng = np.random.default_rng(20261130)
    cases = {
        "losses": loss_cases(rng),
        "kl": kl_cases(rng),
        "corrections": [case for _ in range(3) for case in correction_cases(rng)],
        "groups": GROUPS,
        "tokens": TOKENS,
        "rollouts": rollout_cases(),
        "gdpo": gdpo_case(),
        "episodes": EPISODES,
        "turn_returns": [turn_returns_case(d) for d in (1.0, 0.9)],
        "gigpo": [gigpo_case(d, w) for d, w in ((1.0, 1.0), (0.9, 0.5))],
        "gae": [gae_case(rng, d, decay) for d, decay in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0))],
        "value_loss": value_loss_case(rng),
        "normalisers": normaliser_cases(),
    }
    return plain(cases)


def main():
    Path(__file__).with_name("algorithms.json").write_text(json.dumps(all_cases()) + "\n")


if __name__ == "__main__":
    main()
