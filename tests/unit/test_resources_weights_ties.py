"""Which tensors are one tensor, and which are missing."""

from __future__ import annotations

import pytest
import torch

from resources.weights.ties import EMBEDDING, HEAD, split_ties

TIED, UNTIED = b'{"model_type": "qwen3", "tie_word_embeddings": true}', b'{"model_type": "qwen3"}'
MATRIX = torch.arange(6.0).reshape(2, 3)


def test_a_head_that_shares_memory_is_left_out_with_or_without_a_configuration() -> None:
    for config in (TIED, None):
        stored, tied = split_ties({HEAD: MATRIX, EMBEDDING: MATRIX}, config)
        assert list(stored) == [EMBEDDING] and tied == {HEAD: EMBEDDING}


def test_an_equal_copy_of_a_tied_head_is_left_out() -> None:
    stored, tied = split_ties({HEAD: MATRIX.clone(), EMBEDDING: MATRIX}, TIED)
    assert list(stored) == [EMBEDDING] and tied == {HEAD: EMBEDDING}


def test_a_tied_head_that_is_another_matrix_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        split_ties({HEAD: MATRIX + 1, EMBEDDING: MATRIX}, TIED)


def test_an_untied_head_is_stored_and_must_be_there() -> None:
    """S24. A configuration that does not say so means its model type's default: untied for qwen3."""
    stored, tied = split_ties({HEAD: MATRIX + 1, EMBEDDING: MATRIX}, UNTIED)
    assert set(stored) == {HEAD, EMBEDDING} and tied == {}
    with pytest.raises(ValueError, match="does not tie it"):
        split_ties({EMBEDDING: MATRIX}, UNTIED)


def test_views_of_one_memory_that_differ_are_kept() -> None:
    stored, tied = split_ties({"a": MATRIX[0], "b": MATRIX[1], "c": MATRIX[0]}, None)
    assert set(stored) == {"a", "b"} and tied == {"c": "a"}
