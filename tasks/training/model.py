"""Loading the policy for training, and making sure that it computes here what it computes everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from resources.policy.building import ONE_AT_A_TIME
from resources.policy.directory import read_model_config
from tasks.training.attention import use_block_diagonal_attention
from tasks.training.forward import PolicyForward
from tasks.training.packing import Layout, PackableSequence, pack

PROBE_LENGTHS = (7, 5)
PROBE_TOLERANCE = 1e-3
"""Largest difference, in nats, between this learner's log-probabilities and those of the model as its authors wrote
it."""


def load_policy(model_directory: str | Path, layout: Layout, device: str) -> PreTrainedModel:
    """A causal LM in float32, ready for `PolicyForward` in that layout.

    Dropout is off throughout: the learner's log-probabilities must be those of the engines.

    Raises:
        ValueError: when the directory holds no model, or when the model does more than decoder and head (a bias on the
            logits, a soft cap), which this forward pass would leave out.
    """
    directory = Path(model_directory)
    read_model_config(directory)
    with _no_progress_bar(), ONE_AT_A_TIME:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    torch.nn.Module.to(model, device)
    model.eval()
    sequences = _probe_sequences(int(model.config.get_text_config().vocab_size))
    with torch.no_grad():
        expected = [_own_logprobs(model, sequence, device) for sequence in sequences]
        if layout == "packed":
            use_block_diagonal_attention(model)
        batch = pack(sequences, range(len(sequences)), layout, device)
        computed, _ = PolicyForward(model, max_logits_per_chunk=2**25).logprobs(batch)
    difference = float((computed - torch.cat(expected)).abs().max())
    if not difference <= PROBE_TOLERANCE:
        raise ValueError(
            f"policy.model_directory: {type(model).__name__} in {directory} gives log-probabilities that differ by "
            f"{difference:.3g} nats in the learner's {layout!r} forward pass; "
            + ("set training.layout to 'padded', or use" if layout == "packed" else "use")
            + " a model of the Qwen3, Qwen2 or Llama layout"
        )
    return model


def policy_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weights and persistent buffers by name, without second names of one tensor (a tied head): the live tensors, or
    this rank's shards of them."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        tensors[name] = tensor.detach()
    return tensors


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Loading is a matter of milliseconds here, and the bar would end up in the logs."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _probe_sequences(vocabulary_size: int) -> list[PackableSequence]:
    rng = np.random.default_rng(0)
    return [
        PackableSequence(rng.integers(0, vocabulary_size, length), np.arange(length) > 0, temperature=1.0)
        for length in PROBE_LENGTHS
    ]


def _own_logprobs(model: PreTrainedModel, sequence: PackableSequence, device: str) -> torch.Tensor:
    ids = torch.as_tensor(sequence.token_ids, device=device)[None]
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), dim=-1)
    return logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)
