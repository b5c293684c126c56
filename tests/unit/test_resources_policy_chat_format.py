"""Chat format: sampled ids stay as they are, and everything between two actions is context."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resources.environments.base import Message
from resources.policy.chat_format import ChatFormat
from resources.policy.config import PolicyConfig
from resources.policy.tiny import create_tiny_policy

OPENING: list[Message] = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go left or right."}]
OBSERVATION: list[Message] = [{"role": "user", "content": "You are at 3."}]
NEWLINE_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = ["Go left or right. You are at 3.", "<act>left</act>"] * 10
    config = PolicyConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16)
    return create_tiny_policy(tmp_path_factory.mktemp("policy"), config, corpus, seed=0)


@pytest.fixture(scope="module")
def chat(directory: Path) -> ChatFormat:
    return ChatFormat.from_directory(directory)


def with_template(directory: Path, target: Path, template: str) -> ChatFormat:
    shutil.copytree(directory, target)
    (target / "chat_template.jinja").write_text(template)
    return ChatFormat.from_directory(target)


def text_of(chat: ChatFormat, ids: np.ndarray) -> str:
    return str(chat.tokenizer.decode(ids.tolist()))


def test_opening_is_the_template_with_the_generation_prompt(chat: ChatFormat) -> None:
    ids = chat.opening(OPENING)
    assert ids.dtype == np.int32
    assert text_of(chat, ids) == "<|system|>Play.<|end|><|user|>Go left or right.<|end|><|assistant|>"
    with pytest.raises(ValueError, match="at least one message"):
        chat.opening([])


def test_a_conversation_in_pieces_equals_the_template_over_the_whole(chat: ChatFormat) -> None:
    action = chat.tokenizer.encode("<act>left</act><|end|>", add_special_tokens=False)
    pieces = np.concatenate([chat.opening(OPENING), action, chat.continuation(OBSERVATION, action[-1])])
    whole = chat.opening([*OPENING, {"role": "assistant", "content": "<act>left</act>"}, *OBSERVATION])
    assert pieces.tolist() == whole.tolist()


def test_newline_after_eos_is_context(directory: Path, tmp_path: Path) -> None:
    """M17: the template ends a turn with eos + newline, the engine stops at eos: the newline is context."""
    chat = with_template(directory, tmp_path / "newline", NEWLINE_TEMPLATE)
    (end,) = chat.stop_token_ids
    after_stop = text_of(chat, chat.continuation(OBSERVATION, end))
    assert after_stop == "\n<|user|>You are at 3.<|end|>\n<|assistant|>"
    left: Any = chat.tokenizer.convert_tokens_to_ids("left")
    after_length = text_of(chat, chat.continuation(OBSERVATION, left))
    assert after_length == "<|end|>" + after_stop


def test_different_ids_with_one_text_stay_different(chat: ChatFormat) -> None:
    """M15, M16: a sampled action is only ever decoded; its ids, and so the length of its log-probabilities, stay."""
    convert: Any = chat.tokenizer.convert_tokens_to_ids
    merged, spelled = [convert("left")], [convert(letter) for letter in "left"]
    assert merged != spelled
    assert chat.decode_action(merged) == chat.decode_action(spelled) == "left"
    # A continuation depends on the last id only, never on the action's text.
    assert chat.continuation(OBSERVATION, merged[-1]).tolist() == chat.continuation(OBSERVATION, spelled[-1]).tolist()


def test_only_one_stop_token_is_removed_and_tags_stay_visible(chat: ChatFormat) -> None:
    """M12: what ends an action is its last position, not the value of its tokens."""
    encode = chat.tokenizer.encode
    assert chat.decode_action(encode("<act>left</act><|end|>", add_special_tokens=False)) == "<act>left</act>"
    assert chat.decode_action(encode("<act>left</act>", add_special_tokens=False)) == "<act>left</act>"
    assert chat.decode_action(encode("left<|end|><|end|>", add_special_tokens=False)) == "left<|end|>"
    assert chat.decode_action(np.asarray(encode("<|pad|><|end|>", add_special_tokens=False))) == "<|pad|>"


def test_nothing_was_sampled(chat: ChatFormat) -> None:
    """M23: a zero-token response is an empty action, and its turn is closed by the template."""
    assert chat.decode_action([]) == ""
    assert text_of(chat, chat.continuation(OBSERVATION, None)) == "<|end|><|user|>You are at 3.<|end|><|assistant|>"


def test_a_template_that_rewrites_the_past_still_gives_an_append_only_continuation(
    directory: Path, tmp_path: Path
) -> None:
    template = (
        "{% for message in messages %}<|{{ message['role'] }}|>"
        "{% if message['role'] == 'assistant' and loop.last %}hidden{% endif %}{{ message['content'] | trim }}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = with_template(directory, tmp_path / "rewriting", template)
    assert text_of(chat, chat.continuation(OBSERVATION, None)).startswith("<|end|>\n<|user|>You are at 3.")


def test_an_extension_appends_what_the_template_adds_to_what_was_said(chat: ChatFormat) -> None:
    """M16: the sampled ids stay, however the tokenizer would spell their text."""
    convert: Any = chat.tokenizer.convert_tokens_to_ids
    spelled = [*(convert(letter) for letter in "left"), chat.stop_token_ids[0]]
    said = np.concatenate([chat.opening(OPENING), spelled])
    conversation: list[Message] = [*OPENING, {"role": "assistant", "content": "left"}, *OBSERVATION]
    extension = chat.extension(conversation, said)
    assert extension is not None and extension.tolist() == chat.continuation(OBSERVATION, spelled[-1]).tolist()
    cut = chat.extension(conversation, said[:-1])
    assert cut is not None and text_of(chat, cut).startswith("<|end|><|user|>"), "the template ends the turn itself"


def test_a_template_that_rewrites_what_was_said_has_no_extension(directory: Path, tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}<|{{ message['role'] }}|>"
        "{{ message['content'][:2] if message['role'] == 'assistant' and not loop.last else message['content'] }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = with_template(directory, tmp_path / "forgetful", template)
    for action, is_kept in (("left", False), ("le", True)):
        ids = chat.tokenizer.encode(f"{action}<|end|>", add_special_tokens=False)
        said = np.concatenate([chat.opening(OPENING), ids])
        extension = chat.extension([*OPENING, {"role": "assistant", "content": action}, *OBSERVATION], said)
        assert (extension is not None) == is_kept
    with pytest.raises(ValueError, match=r"turns cannot be appended .* set rollout\.history to 'template'"):
        chat.check_appending()


def test_generation_config_adds_stop_tokens(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "two")
    (tmp_path / "two" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    chat = ChatFormat.from_directory(tmp_path / "two")
    assert chat.stop_token_ids == (1, 7)
    # The other stop token was sampled: it stays, and the template's own turn end follows as context.
    assert text_of(chat, chat.continuation(OBSERVATION, 7)).startswith("<|end|><|user|>")


def test_unusable_templates_are_refused_with_the_remedy(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not print the content of assistant messages"):
        with_template(directory, tmp_path / "hiding", "{% for message in messages %}{{ message['role'] }}{% endfor %}")
    refusing = "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ message['content'] }}{% endfor %}"  # fmt: skip # noqa: E501
    chat = with_template(directory, tmp_path / "refusing", refusing)
    with pytest.raises(ValueError, match=r"refuses the roles .*no tools"):
        chat.continuation([{"role": "tool", "content": "4"}], None)
    shutil.copytree(directory, tmp_path / "none")
    (tmp_path / "none" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        ChatFormat.from_directory(tmp_path / "none")


def test_hashes_name_the_tokenizer_and_the_template(chat: ChatFormat, directory: Path, tmp_path: Path) -> None:
    other = with_template(directory, tmp_path / "other", NEWLINE_TEMPLATE)
    assert len(chat.tokenizer_hash) == 64
    assert other.tokenizer_hash == chat.tokenizer_hash
    assert other.template_hash != chat.template_hash
    assert ChatFormat.from_directory(directory).template_hash == chat.template_hash


def test_formatting_needs_no_torch(directory: Path) -> None:
    code = (
        "import sys; from resources.policy.chat_format import ChatFormat;"
        f"chat = ChatFormat.from_directory({str(directory)!r});"
        "chat.opening([{'role': 'user', 'content': 'hi'}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])
