"""A policy of which only the tokenizer is needed: nothing is computed with it, as in a simulation."""

from __future__ import annotations

import json
from pathlib import Path

from resources.policy.directory import small_files

CONFIG_FILE = "config.json"


def check_tokenizer_directory(directory: str | Path) -> None:
    """Raise ValueError, with the path and the remedy, unless a tokenizer with a chat template is there."""
    from resources.policy.chat_format import ChatFormat

    ChatFormat.from_directory(directory)
    read_vocabulary_size(directory)


def tokenizer_files(directory: str | Path) -> dict[str, bytes]:
    """What a published version needs so that rollouts find the tokenizer, by file name; a ``config.json`` that says no
    more than the size of the vocabulary where the directory has none."""
    files = small_files(directory)
    if CONFIG_FILE not in files:
        described = {"vocab_size": read_vocabulary_size(directory), "tie_word_embeddings": True}
        files[CONFIG_FILE] = json.dumps(described).encode()
    return files


def read_vocabulary_size(directory: str | Path) -> int:
    """Tokens of a policy directory: by its ``config.json``, else by its ``tokenizer.json``.

    Raises ValueError naming the directory when neither says.
    """
    directory = Path(directory)
    if (directory / CONFIG_FILE).is_file():
        size = json.loads((directory / CONFIG_FILE).read_bytes()).get("vocab_size")
        if isinstance(size, int):
            return size
    if (directory / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    raise ValueError(
        f"{str(directory)!r} has neither a config.json with vocab_size nor a tokenizer.json, so the number of its "
        "tokens is unknown; add one of them"
    )
