"""Loading a policy for training. Also the builder of the small models that the other training tests use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tasks.training.model import load_policy, policy_tensors
from tests.unit.test_tasks_training_row import VOCABULARY

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}


def make_model_directory(directory: Path, *, tied: bool = True, llama: bool = False, **sizes: float) -> Path:
    """A small random causal LM with visibly different weights in every layer, and one file beside it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if llama:
            model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}, tie_word_embeddings=tied))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **sizes}, tie_word_embeddings=tied))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("llama", [False, True])
def test_qwen3_and_llama_load_in_both_layouts(tmp_path: Path, layout, llama: bool) -> None:
    model = load_policy(make_model_directory(tmp_path, llama=llama), layout, "cpu")
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist or is no directory"):
        load_policy(tmp_path / "nowhere", "packed", "cpu")


def test_a_model_that_does_more_than_decoder_and_head_is_refused(tmp_path: Path, monkeypatch) -> None:
    """A model that scales its logits would silently be trained on other log-probabilities."""
    forward = Qwen3ForCausalLM.forward

    def scaled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", scaled)
    with pytest.raises(ValueError, match=r"differ by .* nats"):
        load_policy(make_model_directory(tmp_path), "packed", "cpu")


def test_a_tied_head_has_one_name_and_an_untied_one_its_own(tmp_path: Path) -> None:
    tied = load_policy(make_model_directory(tmp_path / "tied"), "packed", "cpu")
    untied = load_policy(make_model_directory(tmp_path / "untied", tied=False), "packed", "cpu")
    assert "lm_head.weight" not in policy_tensors(tied)
    assert "lm_head.weight" in policy_tensors(untied)
    assert policy_tensors(tied).keys() | {"lm_head.weight"} == policy_tensors(untied).keys()
