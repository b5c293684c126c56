"""Messages to token ids and back, for one append-only token sequence: what was sampled is never encoded again.

A trajectory's tokens are: opening | action 0 | continuation 1 | action 1 | continuation 2 | ... The opening is the
chat template over the opening messages. A continuation is everything the template puts between the end of a sampled
action and the next one: the rest of the assistant turn, the observation, the generation prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from resources.environments.base import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for the sampled action while the template is rendered around it; no template or observation produces it.
_ACTION = "\u2042action\u2042"


class ChatFormat:
    """The chat template of one tokenizer, as a generator of token ids. Works with any Hugging Face tokenizer that has a
    chat template; needs no torch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, extra_stop_token_ids: Sequence[int] = ()) -> None:
        """``extra_stop_token_ids``: further ids that end a turn, such as those of ``generation_config.json``.

        Raises ValueError without a chat template, or when the template hides what the assistant said.
        """
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; add a chat_template to its "
                "tokenizer_config.json, or a chat_template.jinja file"
            )
        self.tokenizer = tokenizer
        self._turn_end = self._render_turn_end()
        """Text that the template puts after the assistant's words."""
        turn_end_ids = self._encode(self._turn_end)
        stops = [tokenizer.eos_token_id, *extra_stop_token_ids]
        if turn_end_ids and turn_end_ids[0] in tokenizer.all_special_ids:
            stops.insert(0, turn_end_ids[0])
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(int(stop) for stop in stops if stop is not None))
        """Ids at which an engine ends a turn; never empty. The first is the one the template itself uses."""
        if not self.stop_token_ids:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no eos_token and its chat template ends turns without a "
                "special token, so no generation could stop; set eos_token in tokenizer_config.json"
            )
        self.vocabulary_size = len(tokenizer)

    @classmethod
    def from_directory(cls, directory: str | Path) -> ChatFormat:
        """Load from a model directory. Raises ValueError with the path and the remedy when it cannot be read."""
        directory = Path(directory)
        remedy = "give policy.model_directory a Hugging Face directory with tokenizer files and a chat template"
        if not directory.is_dir():
            raise ValueError(f"model directory {str(directory)!r} does not exist or is no directory; {remedy}")
        if not any(
            (directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        ):
            raise ValueError(f"model directory {str(directory)!r} has no tokenizer files; {remedy}")
        try:
            if (directory / "tokenizer.json").exists():
                # Read as it is: AutoTokenizer would import torch, in every process that only formats text.
                from transformers import PreTrainedTokenizerFast

                tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
            else:
                from transformers import AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"the tokenizer in {str(directory)!r} cannot be loaded ({error}); {remedy}") from error
        return cls(tokenizer, _generation_stops(directory))

    def opening(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 ids of the opening messages and the generation prompt. Raises ValueError when there is no message."""
        if not messages:
            raise ValueError("an episode must open with at least one message; its environment's reset returned none")
        return np.asarray(self._encode(self._render(list(messages), generation_prompt=True)), dtype=np.int32)

    def continuation(self, observation: Sequence[Message], last_token_id: int | None) -> np.ndarray:
        """int32 ids to append after a sampled action whose last id is ``last_token_id`` (None: nothing was sampled).

        All of them are context: the rest of the assistant turn as the template writes it (without its stop token, when
        that is what was sampled), the observation, and the generation prompt.
        """
        text = self._render(
            [{"role": "user", "content": "."}, {"role": "assistant", "content": _ACTION}, *observation],
            generation_prompt=True,
        )
        rest = self._after_action(text)
        if last_token_id is not None and last_token_id in self.stop_token_ids:
            stop = self._decode([last_token_id])
            if rest.startswith(stop):
                rest = rest[len(stop) :]
        return np.asarray(self._encode(rest), dtype=np.int32)

    def check_appending(self) -> None:
        """Raises ValueError when no turn could be appended to another: the template changes what earlier ones said."""
        self.continuation([{"role": "user", "content": "."}], None)

    def extension(self, messages: Sequence[Message], token_ids: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """int32 ids to append to ``token_ids`` so that they say what the template says over the whole conversation.

        None when that is impossible: what the template says does not begin with the text of ``token_ids``, so it has
        rewritten something. Texts are compared, never ids: what was sampled may be spelled in other tokens than the
        tokenizer would choose.
        """
        text = self._render(list(messages), generation_prompt=True)
        said = self._decode([int(token_id) for token_id in token_ids])
        if not text.startswith(said):
            return None
        return np.asarray(self._encode(text[len(said) :]), dtype=np.int32)

    def decode_action(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Text of a sampled action: one stop token at its end is removed, every other special token stays visible."""
        ids = [int(token_id) for token_id in token_ids]
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self._decode(ids)

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of everything that maps text to ids."""
        backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            content = backend.to_str()
        else:
            content = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def template_hash(self) -> str:
        """SHA-256 of the chat template."""
        return hashlib.sha256(json.dumps(self.tokenizer.chat_template, sort_keys=True).encode()).hexdigest()

    def _render_turn_end(self) -> str:
        text = self._render(
            [{"role": "user", "content": "."}, {"role": "assistant", "content": _ACTION}], generation_prompt=False
        )
        return self._after_action(text)

    def _after_action(self, text: str) -> str:
        _, found, after = text.rpartition(_ACTION)
        if not found:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} does not print the content of assistant "
                "messages unchanged, so turns cannot be appended to it; use a template that does, or, when it is "
                "earlier turns that it changes, set rollout.history to 'template'"
            )
        return after

    def _render(self, messages: list[Message], *, generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        conversation: Any = messages
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=generation_prompt
            )
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses the roles {roles} ({error});"
                " use a template that accepts them, or let the environment send roles that it accepts"
            ) from error
        assert isinstance(text, str), type(text)
        return text

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), type(text)
        return text


def _generation_stops(directory: Path) -> list[int]:
    path = directory / "generation_config.json"
    if not path.exists():
        return []
    try:
        stops = json.loads(path.read_bytes()).get("eos_token_id")
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON ({error}); repair or remove it") from error
    if stops is None:
        return []
    return list(stops) if isinstance(stops, list) else [stops]
