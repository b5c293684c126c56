"""Is this a model directory that engines and the learner can use, and which of its files travel with every version?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
_REMEDY = (
    "give policy.model_directory the path of a Hugging Face directory (config.json, *.safetensors, tokenizer files), "
    "or leave it out to create a tiny policy"
)
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_LARGEST_FILE_BYTES = 64 * 2**20
INDEX_FILE = "model.safetensors.index.json"
"""Which tensor lies in which file, where weights lie in several."""


def read_model_config(directory: str | Path) -> dict[str, Any]:
    """The directory's ``config.json``. Raises ValueError, with the path and the remedy, unless the directory exists, is
    readable and holds an architecture that engines support."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"model directory {str(directory)!r} does not exist or is no directory; {_REMEDY}")
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except FileNotFoundError:
        raise ValueError(f"model directory {str(directory)!r} has no config.json; {_REMEDY}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(directory / 'config.json')!r} cannot be read ({error}); {_REMEDY}") from error
    architectures = config.get("architectures") or ["(none named)"]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"model directory {str(directory)!r} holds a {architectures[0]}; supported architectures are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}; give policy.model_directory one of those"
        )
    return config


def check_policy_directory(directory: str | Path) -> None:
    """Raise ValueError, with the path and the remedy, unless weights are there, and a tokenizer with a chat template
    whose ids the model knows."""
    from resources.policy.chat_format import ChatFormat

    directory = Path(directory)
    vocabulary_size = read_model_config(directory).get("vocab_size")
    if not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"model directory {str(directory)!r} has no *.safetensors file; {_REMEDY}. Weights in another format are "
            "converted with transformers: from_pretrained(...).save_pretrained(...)"
        )
    highest = max(ChatFormat.from_directory(directory).tokenizer.get_vocab().values())
    if vocabulary_size is not None and highest >= vocabulary_size:
        raise ValueError(
            f"model directory {str(directory)!r}: the tokenizer has ids up to {highest}, the model's vocabulary "
            f"(vocab_size in config.json) holds 0 to {vocabulary_size - 1}; they are of different models. Put the "
            "model's own tokenizer there, or enlarge the model's embedding to the tokenizer's size"
        )


def weights_digest(directory: str | Path) -> str:
    """SHA-256 over the weights of a model directory: names and contents of its ``*.safetensors``. Reads all of them."""
    hashes = {}
    for path in weight_files(directory):
        with path.open("rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digest_of_hashes(hashes)


def digest_of_hashes(hashes: Mapping[str, str]) -> str:
    """`weights_digest` of files whose hexadecimal SHA-256 are known, by file name."""
    digest = hashlib.sha256()
    for name, sha256 in sorted(hashes.items()):
        digest.update(name.encode())
        digest.update(bytes.fromhex(sha256))
    return digest.hexdigest()


def weight_files(directory: str | Path) -> list[Path]:
    """Its ``*.safetensors``, by name."""
    return sorted(Path(directory).glob("*.safetensors"))


def policy_files(directory: str | Path) -> dict[str, bytes]:
    """Everything beside the weights (config, generation config, tokenizer, chat template), by file name: what a
    published version needs so that its own directory loads with `AutoModelForCausalLM` and `AutoTokenizer`."""
    read_model_config(directory)
    return small_files(directory)


def small_files(directory: str | Path) -> dict[str, bytes]:
    """The files of a directory that are neither weights nor large, by name."""
    directory = Path(directory)
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file()
        and path.suffix not in _WEIGHT_SUFFIXES
        and not path.name.endswith(".index.json")
        and not path.name.startswith((".", "manifest"))
        and path.stat().st_size <= _LARGEST_FILE_BYTES
    }
