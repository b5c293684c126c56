"""The loss of one optimizer step in float64, token by token, from rows and rewards to the sum.

Written apart from the implementation: plain Python over transformers' own forward pass, nothing imported from it. A row
is whatever has the attributes of one; a plan names, by family, what is done with its rows.
"""

import math
import statistics
from collections import defaultdict

import torch

EPSILON = 1e-4
DISCOUNT, TRACE_DECAY = 0.95, 0.9


def log_distributions(model, row):
    """float64 [T, V]: of the token behind each position, at the row's temperature."""
    ids = torch.tensor(row.token_ids, dtype=torch.int64)
    return torch.log_softmax(model(input_ids=ids[None]).logits[0] / row.temperature, -1)


class Token:
    """A sampled token: where it lies, and its log-probability under each policy."""

    def __init__(self, row, t, current, reference, version):
        self.row, self.t = row, t
        distribution = current[t - 1]
        self.c = distribution[int(row.token_ids[t])]
        self.p = float(self.c.detach())
        self.b = float(row.behaviour_logprobs[t])
        self.f = float(reference[t - 1][int(row.token_ids[t])])
        self.entropy = -(distribution.exp() * distribution).sum()
        self.age = version - int(row.token_versions[t])
        self.advantage = None


# -- advantages: {rollout: reward less penalties} of one family's groups ----------------------------------------------


def by_group(rewards, formula):
    out = {}
    for members in rewards.values():
        values = list(members.values())
        if len(values) >= 2 and max(values) > min(values):
            out.update({name: formula(name, members) for name in members})
    return out


def grpo(name, members):
    values = list(members.values())
    return (members[name] - statistics.fmean(values)) / (statistics.pstdev(values) + EPSILON)


def centred(name, members):
    return members[name] - statistics.fmean(members.values())


def rloo(name, members):
    return members[name] - statistics.fmean(value for other, value in members.items() if other != name)


def whiten(tokens):
    values = [token.advantage for token in tokens]
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    for token in tokens:
        token.advantage = (token.advantage - mean) / deviation


# -- losses of the tokens of one row ----------------------------------------------------------------------------------


def clipped(ratio, advantage, low, high):
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def ppo_clip(tokens, row):
    return [clipped(torch.exp(x.c - x.b), x.advantage, 0.8, 1.28) for x in tokens]


def policy_gradient(tokens, row):
    return [-x.advantage * x.c for x in tokens]


def gspo(tokens, row):
    s = torch.exp(sum(x.c - x.b for x in tokens) / len(tokens))
    return [clipped(s, x.advantage, 0.95, 1.08) for x in tokens]


def cispo(tokens, row):
    return [-min(math.exp(x.p - x.b), 1.28) * x.advantage * x.c for x in tokens]


def topr_sequence(tokens, row):
    taper = min(math.exp(sum(x.p - x.b for x in tokens)), 1.0)
    return [-(1.0 if row.reward > 0.4 else taper) * x.advantage * x.c for x in tokens]


def kimi_proximal(tokens, row):
    return [-x.advantage * x.c + 0.1 / 2 * (x.c - x.p) ** 2 for x in tokens]


def decoupled_loglinear(tokens, row):
    losses = []
    for x in tokens:
        proximal = x.b + x.age / (x.age + 1) * (x.p - x.b)
        losses.append(min(math.exp(proximal - x.b), 2.0) * clipped(torch.exp(x.c - proximal), x.advantage, 0.8, 1.28))
    return losses


# -- the whole --------------------------------------------------------------------------------------------------------


def step_loss(
    rows, model, reference_model, version, bound, plans, denominator, mask_truncated=False, staleness_mask=99
):
    """Plans by family: ``advantage`` (a formula above, or a name), ``loss``, ``weigh`` (of a token and its row's
    tokens, or None), ``kl`` (coefficient, place, formula of d) or None, ``entropy``, ``weight``, ``normalise``. A row
    of which ``staleness_mask`` leaves nothing is as if it were not there."""
    tokens = []
    for row in rows:
        if len(row.token_ids):
            current = log_distributions(model, row)
            with torch.no_grad():
                reference = log_distributions(reference_model, row)
            tokens += [
                Token(row, t, current, reference, version) for t in range(len(row.token_ids)) if row.loss_mask[t]
            ]

    def penalty(token):
        kl = plans[token.row.family]["kl"]
        return kl[0] * kl[2](token.b - token.f) if kl and kl[1] == "reward" else 0.0

    leaves = min(bound, staleness_mask)
    left = {id(x.row) for x in tokens if x.age <= leaves and x.row.reward is not None}
    counted = {x.row.rollout_id for x in tokens if id(x.row) in left}
    trained = []
    for family, plan in plans.items():
        rewards = defaultdict(dict)
        for row in rows:
            if row.family == family and row.rollout_id in counted:
                paid = sum(penalty(x) for x in tokens if x.row.rollout_id == row.rollout_id)
                rewards[row.group_id][row.rollout_id] = row.reward - paid
        own = [x for x in tokens if x.row.family == family and id(x.row) in left and x.age <= bound]
        own = [x for x in own if not (mask_truncated and x.row.truncated)]
        if plan["advantage"] == "return to go":
            for x in own:
                later = [y for y in tokens if y.row.rollout_id == x.row.rollout_id and place(rows, y) >= place(rows, x)]
                x.advantage = x.row.reward - sum(penalty(y) for y in later)
        elif plan["advantage"] == "gae, values 0":
            for x in own:
                behind = [y for y in tokens if y.row.rollout_id == x.row.rollout_id and place(rows, y) > place(rows, x)]
                x.advantage = (DISCOUNT * TRACE_DECAY) ** len(behind) * x.row.reward
        else:
            of_rollout = by_group(rewards, plan["advantage"])
            for x in own:
                x.advantage = of_rollout.get(x.row.rollout_id)
            own = [x for x in own if x.advantage is not None]
        if plan["normalise"]:
            whiten(own)
        trained += own

    live = [row for row in rows if any(x.row is row for x in trained)]
    total = torch.zeros((), dtype=torch.float64)
    for row in live:
        of_row = [x for x in trained if x.row is row]
        plan = plans[row.family]
        in_family = sum(x.row.family == row.family for x in trained)
        per_token = {
            "token_mean": 1 / len(trained),
            "family_token_mean": 1 / (in_family * len(plans)),
            "sequence_mean": 1 / (len(of_row) * len(live)),
            "fixed_length": 1 / (16 * len(live)),
        }[denominator]
        for x, loss in zip(of_row, plan["loss"](of_row, row), strict=True):
            term = loss * (plan["weigh"](x, of_row) if plan["weigh"] else 1.0)
            if plan["kl"] and plan["kl"][1] == "loss":
                term = term + plan["kl"][0] * plan["kl"][2](x.c - x.f)
            if plan["advantage"] == "gae, values 0":
                term = term + 0.5 * (0.0 - x.advantage) ** 2
            total = total + plan["weight"] * per_token * (term - plan["entropy"] * x.entropy)
    return total, len(trained)


def place(rows, token):
    """Order of a token within its rollout: rows follow each other."""
    return next(i for i, row in enumerate(rows) if row is token.row), token.t
