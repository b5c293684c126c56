"""Runs the off-policy corrections of an update: one weight per trained token, and what was masked and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch

from tasks.training.algorithms import Algorithms
from tasks.training.corrections.base import CorrectionInputs
from tasks.training.losses.ratios import clamped_ratio, sequence_log_ratios


def correction_weights(
    algorithms: Algorithms,
    families_R: Sequence[str],
    log_ratios_R: Mapping[int, torch.Tensor],
    staleness_R: Sequence[torch.Tensor],
) -> tuple[dict[int, torch.Tensor], dict[str, float]]:
    """Weights by row (absent: all 1), float32 [tokens of the row], and metrics.

    Args:
        families_R: family of each row.
        log_ratios_R: by row, proximal minus behaviour log-probability of its trained tokens; may be empty.
        staleness_R: int64, of its trained tokens.

    Weights of several corrections multiply. A token counts as masked under the first that masks it.
    """
    weights: dict[int, torch.Tensor] = {}
    masked: Counter[str] = Counter()
    sums: defaultdict[str, float] = defaultdict(float)
    num_tokens = num_with_ratio = 0
    for algorithm, rows in algorithms.by_algorithm(families_R):
        if not algorithm.corrections:
            continue
        counts = [len(staleness_R[row]) for row in rows]
        staleness_N = torch.cat([staleness_R[row] for row in rows])
        sequence_N = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts)).to(staleness_N.device)
        log_ratio_N = torch.cat([log_ratios_R[row] for row in rows]) if rows[0] in log_ratios_R else None
        inputs = CorrectionInputs(log_ratio_N, staleness_N, sequence_N, len(rows))
        total_N = torch.ones_like(staleness_N, dtype=torch.float32)
        for correction, name in zip(algorithm.corrections, algorithm.correction_names, strict=True):
            weights_N = correction.weights(inputs)
            if weights_N.shape != staleness_N.shape or not (torch.isfinite(weights_N) & (weights_N >= 0)).all():
                raise ValueError(
                    f"correction {name!r} gave weights of shape {tuple(weights_N.shape)} for {len(staleness_N)} "
                    "tokens, or one that is negative, NaN or infinite; it must give a finite weight of at least 0 for "
                    "each"
                )
            masked[name] += int(((total_N > 0) & (weights_N == 0)).sum())
            total_N = total_N * weights_N
        weights.update(zip(rows, total_N.split(counts), strict=True))
        num_tokens += sum(counts)
        sums["correction/weight"] += float(total_N.double().sum())
        if log_ratio_N is not None:
            num_with_ratio += sum(counts)
            sums_S, means_S = sequence_log_ratios(log_ratio_N, sequence_N, len(rows))
            for name, ratio_N in {
                "behaviour_weight/mean": clamped_ratio(log_ratio_N),
                "behaviour_weight/sequence_sum": clamped_ratio(sums_S).index_select(0, sequence_N),
                "behaviour_weight/sequence_mean": clamped_ratio(means_S).index_select(0, sequence_N),
            }.items():
                sums[name] += float(ratio_N.double().sum())
    metrics: dict[str, float] = {f"tokens/masked/{name}": count for name, count in masked.items()}
    for name, total in sums.items():
        metrics[name] = total / (num_tokens if name == "correction/weight" else num_with_ratio)
    return weights, metrics
