"""What is minimised at a token: the loss of its family's algorithm, times the weight of the corrections, plus KL and
entropy terms.

Corrections weigh the policy's loss alone. Legend: N trained tokens of a micro-batch, S sequences in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tasks.training.algorithms import Algorithm, Algorithms
from tasks.training.losses.base import LossInputs, TokenLosses
from tasks.training.losses.reference_kl import reference_kl


class Objective:
    """The losses of all algorithms of a run as one."""

    def __init__(self, algorithms: Algorithms) -> None:
        self.algorithms = algorithms
        self.needs_proximal = any(algorithm.needs_proximal for algorithm in algorithms.all)
        self.needs_reference = any(algorithm.needs_reference for algorithm in algorithms.all)
        self.needs_entropy_gradient = any(algorithm.needs_entropy_gradient for algorithm in algorithms.all)

    def token_losses(
        self, inputs: LossInputs, families_S: Sequence[str], weights_N: torch.Tensor | None = None
    ) -> TokenLosses:
        """Losses of all tokens. ``weights_N``: of the corrections, float32 [N]; None: all 1.

        Rows are never split, so a sequence's ratio is whole in whatever part its algorithm sees.
        """
        parts = self.algorithms.by_algorithm(families_S)
        if len(parts) == 1:
            return algorithm_losses(parts[0][0], inputs, weights_N)
        values_N = torch.zeros_like(inputs.behaviour_logprobs_N)
        ratio_N = torch.zeros_like(inputs.behaviour_logprobs_N)
        clipped_N = torch.zeros_like(inputs.behaviour_logprobs_N, dtype=torch.bool)
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}
        for algorithm, sequences in parts:
            part, places = _of_sequences(inputs, sequences)
            losses = algorithm_losses(algorithm, part, None if weights_N is None else weights_N.index_select(0, places))
            values_N = values_N.index_copy(0, places, losses.values_N)
            ratio_N = ratio_N.index_copy(0, places, losses.ratio_N)
            clipped_N = clipped_N.index_copy(0, places, losses.clipped_N)
            for name, value in losses.sums.items():
                sums[name] = sums[name] + value if name in sums else value
                counts[name] = counts.get(name, 0) + losses.counts.get(name, len(places))
        return TokenLosses(values_N, ratio_N, clipped_N, sums, counts)


def algorithm_losses(algorithm: Algorithm, inputs: LossInputs, weights_N: torch.Tensor | None) -> TokenLosses:
    """Losses of tokens that share one algorithm."""
    losses = algorithm.loss.token_losses(inputs)
    expected = inputs.current_logprobs_N.shape
    for name in ("values_N", "ratio_N", "clipped_N"):
        if (shape := getattr(losses, name).shape) != expected:  # torch would broadcast it in silence
            raise ValueError(
                f"loss {type(algorithm.loss).__name__} gave {name} of shape {tuple(shape)} for {expected[0]} tokens; "
                f"it must be of shape {tuple(expected)}"
            )
    values_N = losses.values_N
    sums = dict(losses.sums)
    if weights_N is not None:
        values_N = values_N * weights_N
    if algorithm.kl.coefficient:
        assert inputs.reference_logprobs_N is not None, "the learner computes reference logprobs for this algorithm"
        kl_N = reference_kl(inputs.current_logprobs_N, inputs.reference_logprobs_N, algorithm.kl.estimator)
        sums["reference_kl"] = kl_N.detach().sum()
        if algorithm.kl.place == "loss":
            values_N = values_N + algorithm.kl.coefficient * kl_N
    if algorithm.entropy_coefficient:
        assert inputs.entropy_N is not None, "the learner gives the entropy at every token"
        values_N = values_N - algorithm.entropy_coefficient * inputs.entropy_N
    return replace(losses, values_N=values_N, sums=sums)


def _of_sequences(inputs: LossInputs, sequences: Sequence[int]) -> tuple[LossInputs, torch.Tensor]:
    """The tokens of some sequences, and their places among all."""
    number_S = torch.full((inputs.num_sequences,), -1, dtype=torch.int64, device=inputs.sequence_N.device)
    number_S[list(sequences)] = torch.arange(len(sequences), device=number_S.device)
    number_N = number_S.index_select(0, inputs.sequence_N)
    places = (number_N >= 0).nonzero().squeeze(-1)

    def chosen(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.index_select(0, places)

    part = LossInputs(
        current_logprobs_N=inputs.current_logprobs_N.index_select(0, places),
        behaviour_logprobs_N=inputs.behaviour_logprobs_N.index_select(0, places),
        proximal_logprobs_N=chosen(inputs.proximal_logprobs_N),
        advantages_N=inputs.advantages_N.index_select(0, places),
        sequence_N=number_N.index_select(0, places),
        num_sequences=len(sequences),
        reference_logprobs_N=chosen(inputs.reference_logprobs_N),
        entropy_N=chosen(inputs.entropy_N),
        rewards_N=chosen(inputs.rewards_N),
        staleness_N=chosen(inputs.staleness_N),
    )
    return part, places
