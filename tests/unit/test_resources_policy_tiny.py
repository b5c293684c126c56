"""The tiny policy: a model directory that transformers loads, and a tokenizer that suits small text games."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resources.policy.config import PolicyConfig
from resources.policy.directory import check_policy_directory, policy_files, read_model_config
from resources.policy.tiny import create_tiny_policy
from resources.policy.tokenizer import SPECIAL_TOKENS

CORPUS = [
    "You stand on a frozen lake.\nSFFF\nFHFH\nFFFH\nHFFG",
    "Position: row 3, column 2. left F, right H, up wall, down G.",
    "<act>left</act>",
    "<edit>max(a,b)</edit>",
] * 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_policy(tmp_path_factory.mktemp("policy") / "tiny", PolicyConfig(), CORPUS, seed=0)


def test_it_loads_with_the_auto_classes_and_has_the_size_of_the_quickstart(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 550_000 < model.num_parameters() < 600_000
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.chat_template
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("<act>left</act>", ["<act>", "left", "</act>"]),
        ("<tool>47*6</tool>", ["<tool>", "4", "7", "*", "6", "</tool>"]),
        ("<answer>282</answer>", ["<answer>", "2", "8", "2", "</answer>"]),
        ("<edit>max(a,b)</edit>", ["<edit>", "max", "(", "a", ",", "b", ")", "</edit>"]),
        ("SFFH\nG", ["S", "F", "F", "H", "Ċ", "G"]),
        ("row 3, column 2", ["r", "o", "w", "Ġ", "3", ",", "Ġcolumn", "Ġ", "2"]),
    ],
)
def test_words_merge_and_digits_grid_letters_and_punctuation_stay_single(
    directory: Path, text: str, tokens: list[str]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids) == text


def test_any_text_decodes_to_itself(directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "héllo 世界\t x_y ' n't\r\n  Zoë<|end|>"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens_are_single_tokens_and_never_learned_in_pieces(directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    for token in SPECIAL_TOKENS:
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert "act" not in tokenizer.get_vocab()


def test_same_seed_and_corpus_give_the_same_files(directory: Path, tmp_path: Path) -> None:
    again = create_tiny_policy(tmp_path / "again", PolicyConfig(), CORPUS, seed=0)
    other = create_tiny_policy(tmp_path / "other", PolicyConfig(), CORPUS, seed=1)
    names = sorted(path.name for path in directory.iterdir())
    assert sorted(path.name for path in again.iterdir()) == names
    for name in names:
        assert (again / name).read_bytes() == (directory / name).read_bytes(), name
    assert (other / "model.safetensors").read_bytes() != (directory / "model.safetensors").read_bytes()
    assert (other / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


def test_vocabulary_is_bounded(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = PolicyConfig(vocab_size=288, min_word_frequency=1)
    words = [f"word{chr(97 + i)}{chr(97 + j)} " for i in range(26) for j in range(26)]
    tokenizer = AutoTokenizer.from_pretrained(create_tiny_policy(tmp_path, config, words, seed=0))
    assert len(tokenizer) == 288


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="corpus is empty"):
        create_tiny_policy(tmp_path, PolicyConfig(), ["<act></act>"], seed=0)


def test_policy_files_are_everything_but_weights(directory: Path) -> None:
    files = policy_files(directory)
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= set(files)
    assert not any(name.endswith(".safetensors") for name in files)


def test_bad_directories_are_refused_with_the_path_and_the_remedy(directory: Path, tmp_path: Path) -> None:
    check_policy_directory(directory)
    with pytest.raises(ValueError, match=r"no-such-model.*policy\.model_directory"):
        check_policy_directory(tmp_path / "no-such-model")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        check_policy_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ValueError, match="GPT2LMHeadModel; supported architectures are Qwen3ForCausalLM"):
        check_policy_directory(tmp_path)
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        check_policy_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="has no tokenizer files"):
        check_policy_directory(tmp_path)
    for name, data in policy_files(directory).items():
        (tmp_path / name).write_bytes(data)
    check_policy_directory(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(ValueError, match=r"tokenizer has ids up to \d+, the model's vocabulary .* holds 0 to 99"):
        check_policy_directory(tmp_path)


def test_configuration_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_size / num_heads must be an even integer"):
        PolicyConfig(hidden_size=128, num_heads=3)
    with pytest.raises(ValueError, match=r"must divide policy\.num_heads"):
        PolicyConfig(num_kv_heads=3)
    with pytest.raises(ValueError, match="Extra inputs"):
        PolicyConfig.model_validate({"hiden_size": 1})
    with pytest.raises(ValueError, match="model_directory is empty"):
        PolicyConfig(model_directory=" ")
    monkeypatch.chdir(tmp_path)
    assert PolicyConfig(model_directory="model").model_directory == str(tmp_path / "model")
