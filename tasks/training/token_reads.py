"""A quantity of every sampled token of an update, computed once before its first step: critic values, reference
log-probabilities. Unlike the rows of a step these are all sampled tokens, trained or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tasks.training.config import TrainingConfig
from tasks.training.minibatches import deal_to_ranks
from tasks.training.packing import MicroBatch, PackableSequence, filler, pack, plan_microbatches
from tasks.training.ranks import OneRank, Ranks
from tasks.training.row import TrainingRow


def read_sampled_tokens(
    rows: Sequence[TrainingRow],
    compute: Callable[[MicroBatch], torch.Tensor],
    config: TrainingConfig,
    device: str,
    ranks: Ranks | None = None,
) -> list[np.ndarray]:
    """float32 [T] for each row: what ``compute`` (float [N] for a micro-batch) says at its sampled tokens, 0 at the
    others. Runs without gradient. Ranks share the rows, and each gets all answers."""
    ranks = ranks or OneRank()
    read = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    chosen = [index for index, row in enumerate(rows) if row.loss_mask.any()]
    sequences = [
        PackableSequence(rows[index].token_ids, rows[index].loss_mask.astype(np.bool_), rows[index].temperature)
        for index in chosen
    ]
    lengths = [len(sequence.token_ids) for sequence in sequences]
    plans = [
        [[share[place] for place in places] for places in _plan([lengths[place] for place in share], config)]
        for share in deal_to_ranks(lengths, ranks.size)
    ]
    answers: list[tuple[list[int], np.ndarray]] = []
    with torch.no_grad():
        for places in plans[ranks.rank]:
            values_N = compute(pack(sequences, places, config.layout, device)).float().cpu().numpy()
            answers.append((places, values_N))
        for _ in range(max(len(plan) for plan in plans) - len(plans[ranks.rank])):
            compute(filler(config.layout, device))
    for part in ranks.gather(answers):
        for places, values_N in part:
            start = 0
            for place in places:
                mask = sequences[place].trained
                read[chosen[place]][mask] = values_N[start : start + int(mask.sum())]
                start += int(mask.sum())
            assert start == len(values_N), (start, len(values_N))
    return read


def _plan(lengths: Sequence[int], config: TrainingConfig) -> list[list[int]]:
    return plan_microbatches(lengths, config.max_tokens_per_microbatch, config.layout)
