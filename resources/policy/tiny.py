"""The tiny policy: an untrained Qwen3 causal LM and its tokenizer, as a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from resources.policy.building import ONE_AT_A_TIME
from resources.policy.config import PolicyConfig
from resources.policy.tokenizer import train_tokenizer


def create_tiny_policy(directory: str | Path, config: PolicyConfig, corpus: Iterable[str], seed: int) -> Path:
    """Write a model directory that `AutoModelForCausalLM` and `AutoTokenizer` load; returns its path.

    Qwen3 layout with tied embeddings (arXiv 2505.09388), float32, 0.56M parameters with the default sizes. The same
    corpus, sizes and seed give the same files. ``corpus`` is text of the environments: messages and scripted actions.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from resources.policy.initialisation import initialise

    tokenizer: Any = train_tokenizer(
        corpus,
        vocab_size=config.vocab_size,
        min_word_frequency=config.min_word_frequency,
        context_length=config.context_length,
    )
    layout = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.hidden_size // config.num_heads,
        max_position_embeddings=config.context_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(layout)
        initialise(model)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    layout.architectures = ["Qwen3ForCausalLM"]
    layout.dtype = "float32"
    layout.save_pretrained(directory)
    GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # The tied head is left out, as `save_pretrained` does; writing the file here spares its progress bar.
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
