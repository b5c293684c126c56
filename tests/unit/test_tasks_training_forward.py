"""The forward pass: temperature, borders, and the same numbers through every layout. M10, M13, M20."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.training.forward import PolicyForward, target_logprobs
from tasks.training.model import load_policy
from tasks.training.packing import PackableSequence, pack
from tests.unit.test_tasks_training_model import make_model_directory
from tests.unit.test_tasks_training_row import VOCABULARY

LENGTHS = (9, 4, 17, 12, 1, 30)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model"))


def sequences() -> list[PackableSequence]:
    rng = np.random.default_rng(5)
    return [
        PackableSequence(rng.integers(0, VOCABULARY, length), rng.random(length) < 0.5, temperature)
        for length, temperature in zip(LENGTHS, (1.0, 0.7, 1.3, 1.0, 1.0, 0.5), strict=True)
    ]


def test_m10_temperature_comes_before_the_softmax() -> None:
    """M10: logits [2,1,0], temperature 0.5, token 0: -0.1429, not -0.8152 / 2 or -0.4076."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    logprobs, entropy = target_logprobs(logits, torch.tensor([0]), torch.tensor([2.0]))
    assert float(logprobs) == pytest.approx(-0.1429, abs=1e-4)
    p = torch.softmax(torch.tensor([4.0, 2.0, 0.0], dtype=torch.float64), 0)
    assert float(entropy) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)


def test_an_impossible_token_does_not_make_the_entropy_nan() -> None:
    _, entropy = target_logprobs(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([0]), None)
    assert float(entropy) == pytest.approx(0.693147, abs=1e-5)


def own_logprobs(directory: Path) -> list[np.ndarray]:
    """Each row alone through transformers' own model, float64, all logits, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    expected = []
    for sequence in sequences():
        ids = torch.tensor(sequence.token_ids)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0] / sequence.temperature
        logprobs = torch.log_softmax(logits, -1)
        expected.append(
            np.array([float(logprobs[t - 1, ids[t]]) for t in range(1, len(ids)) if sequence.trained[t]], np.float64)
        )
    return expected


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("max_logits", [2**25, 3 * VOCABULARY])
def test_m20_every_path_gives_the_logprobs_of_a_row_alone(directory: Path, layout, max_logits: int) -> None:
    """M20 and M13: packed, padded and chunked agree with rows that never saw each other."""
    forward = PolicyForward(load_policy(directory, layout, "cpu"), max_logits)
    rows = [5, 1, 0, 4, 3, 2]
    batch = pack(sequences(), rows, layout)
    logprobs, entropy = forward.logprobs(batch)
    expected = np.concatenate([own_logprobs(directory)[row] for row in rows])
    assert np.abs(logprobs.detach().numpy() - expected).max() < 2e-5
    assert entropy.shape == logprobs.shape and not entropy.requires_grad and float(entropy.min()) > 0


def test_m20_gradients_agree_between_packed_padded_and_chunked(directory: Path) -> None:
    gradients = []
    for layout, max_logits in (("packed", 2**25), ("padded", 2**25), ("packed", 2 * VOCABULARY)):
        model = load_policy(directory, layout, "cpu")
        logprobs, _ = PolicyForward(model, max_logits).logprobs(pack(sequences(), range(6), layout))
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    scale = float(gradients[0].abs().max())
    assert float((gradients[0] - gradients[1]).abs().max()) < 1e-6 * max(1.0, scale)
    assert float((gradients[0] - gradients[2]).abs().max()) < 1e-6 * max(1.0, scale)


def test_the_entropys_gradient_is_the_closed_form() -> None:
    """dH / dlogit_j = -p_j (log p_j + H) / T, also beside an impossible token; without being asked, there is none."""
    logits = torch.tensor([[0.3, -1.2, 2.0, -torch.inf]], requires_grad=True)
    _, entropy = target_logprobs(logits, torch.tensor([0]), torch.tensor([1 / 0.7]), entropy_gradient=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    p = np.exp(np.array([0.3, -1.2, 2.0]) / 0.7)
    p /= p.sum()
    expected = -p * (np.log(p) - (p * np.log(p)).sum()) / 0.7
    assert gradient[0].tolist() == pytest.approx([*expected, 0.0], rel=1e-5)
    assert not target_logprobs(logits, torch.tensor([0]), None)[1].requires_grad


def test_the_entropys_gradient_is_the_same_in_chunks(directory: Path) -> None:
    gradients = []
    for max_logits in (2**25, 2 * VOCABULARY):
        model = load_policy(directory, "packed", "cpu")
        outputs = PolicyForward(model, max_logits).tokens(pack(sequences(), range(6)), entropy_gradient=True)
        outputs.entropy_N.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert float((gradients[0] - gradients[1]).abs().max()) < 1e-6 * max(1.0, float(gradients[0].abs().max()))


@pytest.mark.parametrize("max_logits", [2**25, 2 * VOCABULARY])
def test_no_output_is_a_view(directory: Path, max_logits: int) -> None:
    """FSDP2 warns of modules that return one."""
    forward = PolicyForward(load_policy(directory, "packed", "cpu"), max_logits)
    outputs = forward.tokens(pack(sequences(), range(6)), entropy_gradient=True)
    assert not any(output._is_view() for output in outputs)
