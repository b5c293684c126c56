"""Log-probabilities of trained tokens, without ever holding the logits of the others.

Legend: N trained tokens of a micro-batch, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tasks.training.packing import MicroBatch

Precision = Literal["float32", "bfloat16"]


class TokenOutputs(NamedTuple):
    """What the policy says at the N trained tokens of a micro-batch."""

    logprobs_N: torch.Tensor
    """float32: log-probability of each token at its row's temperature."""
    entropy_N: torch.Tensor
    """float32: entropy of the distribution it was drawn from."""
    hidden_ND: torch.Tensor
    """The decoder's hidden state where the token is predicted."""


class PolicyForward(torch.nn.Module):
    """The forward pass of the learner: decoder over all tokens, head over trained positions only.

    Args:
        precision: ``bfloat16`` computes matrix products in that type (autocast) from the float32 weights; the softmax
            is float32 either way.
        recompute_layers: keep the inputs of the decoder's layers only, and compute each layer again in the backward
            pass (gradient checkpointing).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_logits_per_chunk: int,
        *,
        precision: Precision = "float32",
        recompute_layers: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        vocabulary_size = int(model.config.get_text_config().vocab_size)
        self.chunk_N = max(1, max_logits_per_chunk // vocabulary_size)
        self.precision: Precision = precision
        if recompute_layers:
            model.activation_checkpointing_enable({"use_reentrant": False})
            for layer in self.layers:
                # The switch by which a layer asks whether it is trained. Its parts stay in evaluation mode: no dropout.
                layer.training = True

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The decoder's layers, in order."""
        layers = self.model.base_model.layers
        assert isinstance(layers, torch.nn.ModuleList), type(layers)
        return list(layers)

    def logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies (without gradient) of `tokens`."""
        outputs = self.tokens(batch)
        return outputs.logprobs_N, outputs.entropy_N

    def tokens(self, batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenOutputs:
        """See `forward`. Goes through the module's call, where sharded parameters are gathered."""
        return self(batch, entropy_gradient=entropy_gradient)

    def forward(self, batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenOutputs:
        """One pass over a micro-batch. The entropy carries a gradient only if ``entropy_gradient``.

        Positions beyond ``max_logits_per_chunk`` are computed in chunks; with gradients enabled each chunk is
        recomputed in the backward pass, so that one chunk of logits is held at a time.
        """
        with torch.autocast(batch.targets_N.device.type, dtype=torch.bfloat16, enabled=self.precision == "bfloat16"):
            hidden_TD = self.model.base_model(**batch.model_inputs, use_cache=False).last_hidden_state.flatten(0, 1)
            hidden_ND = hidden_TD.index_select(0, batch.hidden_index_N)
            return TokenOutputs(*self._chunked_logprobs(hidden_ND, batch, entropy_gradient), hidden_ND)

    def _chunked_logprobs(
        self, hidden_ND: torch.Tensor, batch: MicroBatch, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_trained = hidden_ND.shape[0]
        if num_trained <= self.chunk_N:
            return self._head_logprobs(hidden_ND, batch.targets_N, batch.inverse_temperature_N, entropy_gradient)
        logprobs, entropies = [], []
        for start in range(0, num_trained, self.chunk_N):
            chunk = slice(start, start + self.chunk_N)
            inverse = None if batch.inverse_temperature_N is None else batch.inverse_temperature_N[chunk]
            arguments = (hidden_ND[chunk], batch.targets_N[chunk], inverse, entropy_gradient)
            if torch.is_grad_enabled():
                chunk_logprobs, chunk_entropies = checkpoint(self._head_logprobs, *arguments, use_reentrant=False)
            else:
                chunk_logprobs, chunk_entropies = self._head_logprobs(*arguments)
            logprobs.append(chunk_logprobs)
            entropies.append(chunk_entropies)
        return torch.cat(logprobs), torch.cat(entropies)

    def _head_logprobs(
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        inverse_temperature_N: torch.Tensor | None,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = self.model.get_output_embeddings()
        assert head is not None, f"{type(self.model).__name__} is a causal LM, so it has a head"
        return target_logprobs(head(hidden_ND), targets_N, inverse_temperature_N, entropy_gradient)


def target_logprobs(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    inverse_temperature_N: torch.Tensor | None,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax of the tempered logits at the targets, and the entropy of the distribution; float32 [N] each.

    The entropy is a constant unless ``entropy_gradient``: its gradient would keep another [N, V] alive.
    """
    logits_NV = logits_NV.float()
    if inverse_temperature_N is not None:
        logits_NV = logits_NV * inverse_temperature_N[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A logit of -inf has probability 0 and adds nothing; 0 * -inf would be NaN.
        entropy_N = -(logprobs_NV.exp() * logprobs_NV.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)
    # A sum of one, not a squeeze: what a sharded module returns must be no view, or FSDP2 warns of it.
    return logprobs_NV.gather(-1, targets_N[:, None]).sum(dim=-1), entropy_N
