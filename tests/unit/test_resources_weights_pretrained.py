"""A published version is a Hugging Face directory: transformers loads it by itself, and computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from resources.object_store import ObjectStore
from resources.weights.store import WeightStore


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_version_loads_with_from_pretrained(store_url: str, tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    config = Qwen3Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, vocab_size=32, tie_word_embeddings=tied, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    config.architectures = [type(model).__name__]
    weights = WeightStore(ObjectStore.open(store_url), "run", cache=tmp_path / "cache")
    weights.publish(0, model.state_dict(), files={"config.json": config.to_json_string().encode()})

    loaded = AutoModelForCausalLM.from_pretrained(weights.directory(0)).eval()
    assert loaded.dtype == dtype
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    fetched = weights.fetch(0, names)
    assert "lm_head.weight" in fetched
    assert model.load_state_dict(fetched, strict=True).missing_keys == []
