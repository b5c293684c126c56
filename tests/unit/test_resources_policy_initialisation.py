"""A tiny policy's first weights: attention hands on what it looks at, and the tied head reads it."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from resources.policy.initialisation import COPY_GAIN, EMBEDDING_STD, initialise


def make_model(num_kv_heads: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=200,
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=num_kv_heads,
            head_dim=32,
            tie_word_embeddings=True,
        )
    )
    initialise(model)
    return model


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_each_head_projects_what_it_attends_to_onto_its_own_subspace(num_kv_heads: int) -> None:
    weights = dict(make_model(num_kv_heads).named_parameters())
    values, outputs = (weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "vo")
    for head in range(4):
        shared = head // (4 // num_kv_heads)
        value = values[shared * 32 : (shared + 1) * 32]
        handed_on = outputs[:, head * 32 : (head + 1) * 32] @ value
        projection = handed_on * 3 / COPY_GAIN
        torch.testing.assert_close(projection @ projection, projection, atol=1e-5, rtol=0)
        assert float(projection.detach().trace()) == pytest.approx(32, abs=1e-3)


def test_the_untrained_policy_prefers_tokens_it_has_seen() -> None:
    model = make_model(2)
    tokens = torch.tensor([[17, 101, 150, 64, 9, 180, 33, 120]])
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens).logits[0, -1]
    seen = tokens[0, :-1]
    others = torch.tensor([token for token in range(200) if token not in tokens[0].tolist()])
    assert float(logits[seen].mean()) > float(logits[others].mean()) + 0.5


def test_embeddings_have_the_stated_deviation() -> None:
    weight = dict(make_model(2).named_parameters())["model.embed_tokens.weight"]
    assert float(weight.detach().std()) == pytest.approx(EMBEDDING_STD, rel=0.05)
