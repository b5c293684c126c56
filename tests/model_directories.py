"""Small random models of every supported layout as Hugging Face directories, and a weight source over them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 61
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-untied-biased": ("Qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "head_dim": None}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "llama-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3-yarn": (
        "Qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
}


def write_model(directory: Path, layout: str = "qwen3-tied", *, seed: int = 0, **sizes: Any) -> Path:
    """A model whose logits are far from flat, its biases and norms random as well."""
    import transformers

    family, settings = LAYOUTS[layout]
    merged = {key: value for key, value in {**_SIZES, **settings, **sizes}.items() if key != "head_dim" or value}
    config = getattr(transformers, f"{family}Config")(**merged)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    return directory


def write_tokenizer(directory: Path) -> Path:
    """A policy directory with a tokenizer and nothing else."""
    from resources.policy.tokenizer import train_tokenizer

    corpus = ["go left", "go right", "higher 4 to 7", "lower 1 to 3"] * 10
    train_tokenizer(corpus, vocab_size=320, min_word_frequency=10, context_length=512).save_pretrained(directory)
    return directory


def full_recompute(directory: Path, tensors: Mapping[str, torch.Tensor] | None, token_ids: list[int]) -> torch.Tensor:
    """Float32 [T, V] log-probabilities of transformers over the whole sequence (with other weights, if given)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if tensors is not None:
        missing, unexpected = model.load_state_dict(dict(tensors), strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0], dim=-1)


class PublishedVersions:
    """A weight source whose versions are random perturbations of a directory's weights; version 0 is the directory."""

    def __init__(self, directory: Path) -> None:
        from safetensors.torch import load_file

        self.path = directory
        self._base = load_file(directory / "model.safetensors")
        self.fetched: list[int] = []

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        self.fetched.append(version)
        self._check_published(version)
        generator = torch.Generator().manual_seed(version)
        return {
            name: tensor + 0.1 * (version > 0) * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self._base.items()
        }

    def num_bytes(self, version: int) -> int:
        self._check_published(version)
        return sum(tensor.numel() * tensor.element_size() for tensor in self._base.values())

    def policy_directory(self, version: int) -> Path:
        self._check_published(version)
        return self.path

    @staticmethod
    def _check_published(version: int) -> None:
        if version < 0:
            raise KeyError(f"version {version} was never published")
