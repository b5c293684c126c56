"""What a pass holds at once, and in which type: chunks of logits, layers' inputs, float32 masters. Sizes are counted
as operations give them out, so they depend on no clock and no allocator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.training.algorithm_config import AdvantageConfig, CorrectionConfig, CriticConfig, KLConfig
from tasks.training.config import LoraConfig, LossConfig
from tasks.training.forward import PolicyForward
from tasks.training.learner import Learner
from tasks.training.model import load_policy
from tasks.training.packing import MicroBatch, PackableSequence, pack
from tests.unit.test_tasks_training_learner import make_batch, make_learner
from tests.unit.test_tasks_training_model import SIZES, make_model_directory
from tests.unit.test_tasks_training_row import VOCABULARY

NUM_TRAINED, CHUNK = 4 * 23, 5
WIDTH = int(SIZES["hidden_size"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


def micro_batch() -> MicroBatch:
    rng = np.random.default_rng(0)
    trained = np.arange(24) > 0
    return pack([PackableSequence(rng.integers(0, VOCABULARY, 24), trained, 0.7) for _ in range(4)], range(4))


class Operations(TorchDispatchMode):
    """Notes every operation: its name, the types of its tensor arguments, and what it gave."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.seen: list[tuple[str, tuple[torch.dtype, ...], list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        outputs = given if isinstance(given, (tuple, list)) else [given]
        shapes = [each.shape for each in outputs if isinstance(each, torch.Tensor)]
        dtypes = tuple(each.dtype for each in args if isinstance(each, torch.Tensor))
        self.seen.append((func.name(), dtypes, shapes))
        return given

    def most_positions(self) -> int:
        """Positions of the largest tensor over the vocabulary that ever was; the weights and their gradients apart."""
        shapes = [shape for _, _, shapes in self.seen for shape in shapes]
        over_vocabulary = [shape for shape in shapes if self.vocabulary in shape and WIDTH not in shape]
        return max(shape.numel() for shape in over_vocabulary) // self.vocabulary

    def input_types(self, name: str) -> set[torch.dtype]:
        """Of the first argument of an operation."""
        return {dtypes[0] for seen, dtypes, _ in self.seen if name in seen and dtypes}


def saved_bytes(compute: Callable[[], torch.Tensor], apart_from: set[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a forward pass keeps for its backward pass, each piece of memory once; parameters apart."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in apart_from:
            kept[pointer] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = compute()
    return result, list(kept.values())


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_no_more_than_a_chunk_of_logits_exists_at_once(directory: Path, entropy_gradient: bool) -> None:
    """In the forward and in the backward pass; without chunks all logits do, which the count must see."""
    most, gradients = {}, {}
    for max_logits in (CHUNK * VOCABULARY, 2**25):
        model = load_policy(directory, "packed", "cpu")
        forward = PolicyForward(model, max_logits)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        batch = micro_batch()
        with Operations() as operations:

            def compute(forward: PolicyForward = forward, batch: MicroBatch = batch) -> torch.Tensor:
                outputs = forward.tokens(batch, entropy_gradient=entropy_gradient)
                return (outputs.logprobs_N - 0.1 * outputs.entropy_N).sum()

            loss, kept = saved_bytes(compute, parameters)
            after_forward = operations.most_positions()
            loss.backward()
        most[max_logits] = after_forward, operations.most_positions()
        wide = [tensor.shape for tensor in kept if VOCABULARY in tensor.shape]
        assert bool(wide) == (max_logits == 2**25), "in chunks, no logits are kept from one chunk to the next"
        gradients[max_logits] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert most[2**25] == (NUM_TRAINED, NUM_TRAINED)
    assert most[CHUNK * VOCABULARY] == (CHUNK, CHUNK)
    chunked, whole = gradients.values()
    assert float((chunked - whole).abs().max()) <= 1e-5 * float(whole.abs().max())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_pass_of_an_update_holds_more_than_a_chunk_of_logits(
    tmp_path: Path, precision: str, lora: LoraConfig | None
) -> None:
    """Reference, critic's values, proximal log-probabilities, corrections, steps with the entropy's gradient."""
    vocabulary = 53  # as no other size of the model or the batch
    learner = make_learner(
        make_model_directory(tmp_path, vocab_size=vocabulary),
        precision=precision,
        lora=lora,
        kl=KLConfig(coefficient=0.1),
        advantage=AdvantageConfig(estimator="gae"),
        critic=CriticConfig(),
        loss=LossConfig(name="decoupled", entropy_coefficient=0.05),
        corrections=(CorrectionConfig(name="ratio_mask"),),
        gradient_checkpointing=True,
        minibatches=2,
        max_logits_per_chunk=CHUNK * vocabulary,
    )
    with Operations(vocabulary) as operations:
        assert learner.update(make_batch(0), 0).metrics["tokens/trained"] > 4 * CHUNK
    assert operations.most_positions() == CHUNK


def test_recomputing_layers_wakes_no_dropout(tmp_path: Path) -> None:
    """A layer recomputes only where it believes that it is trained; what lies in it must not believe so."""
    directory = make_model_directory(tmp_path, attention_dropout=0.5)
    batch = micro_batch()
    plain, *recomputed = (
        PolicyForward(load_policy(directory, "packed", "cpu"), 2**25, recompute_layers=recompute).logprobs(batch)[0]
        for recompute in (False, True, True)
    )
    for found in recomputed:
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)


def test_checkpointed_layers_keep_their_inputs_only(directory: Path) -> None:
    """The same gradient from a fraction of the activations; none of the layers' inner ones is kept."""
    kept_bytes, gradients, inner = {}, {}, {}
    for recompute in (False, True):
        model = load_policy(directory, "packed", "cpu")
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        forward = PolicyForward(model, 2**25, recompute_layers=recompute)
        batch = micro_batch()
        loss, kept = saved_bytes(lambda f=forward, b=batch: f.tokens(b).logprobs_N.sum(), parameters)
        kept_bytes[recompute] = sum(tensor.numel() * tensor.element_size() for tensor in kept)
        inner[recompute] = [tensor.shape for tensor in kept if SIZES["intermediate_size"] in tensor.shape]
        loss.backward()
        gradients[recompute] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert inner[False] and not inner[True]
    # What a checkpoint itself holds, one input a layer, goes past the hooks; it is counted here.
    inputs = int(SIZES["num_hidden_layers"]) * 4 * 24 * WIDTH * 4
    assert kept_bytes[True] + inputs < kept_bytes[False] / 2, (kept_bytes, inputs)
    torch.testing.assert_close(gradients[True], gradients[False], rtol=1e-6, atol=1e-7)


BFLOAT16_TOLERANCE = 0.02
"""Of losses and norms, relative: bfloat16 keeps 8 bits, an error of 0.4 % a product."""


def test_bfloat16_computes_products_and_nothing_else(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters, gradients, moments and what is published are float32, and so is every softmax over the vocabulary."""
    learners: dict[str, Learner] = {
        precision: make_learner(directory, precision=precision, minibatches=1) for precision in ("float32", "bfloat16")
    }
    learner = learners["bfloat16"]
    gradients: list[torch.dtype] = []
    step = learner._optimizer.step

    def noting(*arguments: Any, **named: Any) -> Any:
        gradients.extend(p.grad.dtype for p in learner.model.parameters() if p.grad is not None)
        return step(*arguments, **named)

    monkeypatch.setattr(learner._optimizer, "step", noting)
    with Operations() as operations:
        rough = learner.update(make_batch(0), 0).metrics
    exact = learners["float32"].update(make_batch(0), 0).metrics
    assert operations.input_types("aten::mm") == {torch.bfloat16}, "the products are bfloat16"
    assert operations.input_types("aten::_log_softmax") == {torch.float32}
    assert operations.input_types("aten::_log_softmax_backward_data") == {torch.float32}
    assert gradients and set(gradients) == {torch.float32}
    assert {parameter.dtype for parameter in learner.model.parameters()} == {torch.float32}
    moments = [each for state in learner._optimizer.state.values() for each in state.values()]
    assert moments and {moment.dtype for moment in moments} == {torch.float32}
    assert {tensor.dtype for tensor in learner.tensors().values()} == {torch.float32}
    for name in ("loss", "entropy", "approx_kl", "grad_norm"):
        assert rough[name] == pytest.approx(exact[name], rel=BFLOAT16_TOLERANCE, abs=1e-3), name
    assert rough["loss"] != exact["loss"], "products were rounded"


def test_streamed_gradients_are_float32_under_bfloat16(directory: Path) -> None:
    learner = make_learner(directory, precision="bfloat16", minibatches=1, streamed=True, max_tokens_per_microbatch=20)
    learner.stream(make_batch(0)[:8], 0)
    assert learner._streamed is not None
    buffers = [each for bucket in learner._streamed.steps._gradients.values() for each in bucket if each is not None]
    assert buffers and {buffer.dtype for buffer in buffers} == {torch.float32}
