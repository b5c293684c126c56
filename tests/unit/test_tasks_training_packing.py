"""Packing: labels, positions, borders, plans. M12, M13."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.training.attention import BLOCK_LENGTH_RATIO, BlockDiagonal
from tasks.training.packing import IGNORE, PackableSequence, next_token_labels, pack, plan_microbatches


def sequence(ids: list[int], trained: list[bool] | None = None, temperature: float = 1.0) -> PackableSequence:
    mask = np.array(trained) if trained is not None else np.ones(len(ids), np.bool_)
    return PackableSequence(np.array(ids), mask, temperature)


def test_m13_labels_of_packed_rows() -> None:
    """M13: packed [1,2,3],[7,8]: labels 2,3,ignore,8,ignore."""
    labels = np.concatenate(next_token_labels([sequence([1, 2, 3]), sequence([7, 8])]))
    assert labels.tolist() == [2, 3, IGNORE, 8, IGNORE]


def test_m13_packed_rows_predict_within_their_own_row() -> None:
    batch = pack([sequence([1, 2, 3]), sequence([7, 8])], [0, 1])
    assert batch.model_inputs["input_ids"].tolist() == [[1, 2, 3, 7, 8]]
    assert batch.model_inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch.hidden_index_N.tolist() == [0, 1, 3]
    assert batch.targets_N.tolist() == [2, 3, 8]
    assert batch.sequence_N.tolist() == [0, 0, 1]
    assert batch.num_tokens == 5


def test_padded_rows_hold_the_same_targets() -> None:
    batch = pack([sequence([1, 2, 3]), sequence([7, 8])], [1, 0], layout="padded")
    assert batch.model_inputs["input_ids"].tolist() == [[7, 8, 0], [1, 2, 3]]
    assert batch.model_inputs["attention_mask"].tolist() == [[True, True, False], [True, True, True]]
    assert batch.hidden_index_N.tolist() == [0, 3, 4]
    assert batch.targets_N.tolist() == [8, 2, 3]


def test_m12_masks_come_from_lengths_not_from_token_values() -> None:
    """M12: ids [5,6,2,2,2] where 2 is both pad and eos, of length 3: the sampled 2 at position 2 is trained."""
    padded = pack([sequence([5, 6, 2]), sequence([1, 1, 1, 1, 1])], [0, 1], layout="padded")
    assert padded.model_inputs["attention_mask"][0].tolist() == [True, True, True, False, False]
    assert padded.targets_N[:2].tolist() == [6, 2]
    zeros = pack([sequence([0, 0, 0])], [0])
    assert zeros.targets_N.tolist() == [0, 0]


def test_only_trained_positions_are_targets_and_carry_their_temperature() -> None:
    rows = [sequence([1, 2, 3, 4], [False, False, True, True], temperature=0.5), sequence([5, 6], [False, True])]
    batch = pack(rows, [0, 1])
    assert batch.targets_N.tolist() == [3, 4, 6]
    assert batch.inverse_temperature_N is not None
    assert batch.inverse_temperature_N.tolist() == [2.0, 2.0, 1.0]
    assert pack(rows, [1]).inverse_temperature_N is None


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 100), st.sampled_from(["packed", "padded"])
)
def test_plans_hold_every_row_once_and_keep_the_budget(lengths: list[int], budget: int, layout) -> None:
    plan = plan_microbatches(lengths, budget, layout)
    assert sorted(index for part in plan for index in part) == list(range(len(lengths)))
    ordered = [lengths[index] for part in plan for index in part]
    assert ordered == sorted(ordered)
    for part in plan:
        size = sum(lengths[i] for i in part) if layout == "packed" else len(part) * max(lengths[i] for i in part)
        assert len(part) == 1 or size <= budget


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_blocks_hold_every_packed_token_once_in_nearly_rectangular_blocks(lengths: list[int]) -> None:
    layout = BlockDiagonal.of_lengths(np.array(sorted(lengths)))
    places = torch.cat([block.gather for block in layout.blocks])
    assert places.index_select(0, layout.scatter).tolist() == list(range(sum(lengths)))
    assert len(places) <= BLOCK_LENGTH_RATIO * sum(lengths) + 1e-9


def test_a_sliding_window_shorter_than_a_row_is_refused() -> None:
    from tasks.training.attention import attend

    states = torch.zeros(1, 1, 5, 2)
    with pytest.raises(ValueError, match=r"training\.layout to 'padded'"):
        attend(
            torch.nn.Identity(),
            states,
            states,
            states,
            None,
            block_diagonal=BlockDiagonal.of_lengths(np.array([5])),
            sliding_window=4,
        )
