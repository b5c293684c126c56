"""The fused forward pass equals transformers, layout by layout, and refuses what it could not run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from resources.engines.local_forward import LocalForward, Piece, SingleAttention
from resources.engines.local_layout import read_layout
from resources.engines.local_weights import fuse_weights
from tests.model_directories import LAYOUTS, VOCAB_SIZE, PublishedVersions, full_recompute, write_model

NOTHING = np.empty(0, dtype=np.int64)


def edited(directory: Path, **settings: object) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **settings}))
    return directory


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_it_equals_a_full_recompute_by_transformers(layout_name: str, tmp_path: Path) -> None:
    """Prompts in pieces, then single tokens of some slots, dense and sparse: within 1e-4 of transformers."""
    directory = write_model(tmp_path, layout_name)
    layout = read_layout(directory)
    weights = fuse_weights(layout, PublishedVersions(directory).fetch(0), version=0)
    forward = LocalForward(layout, num_slots=6, context_length=160)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB_SIZE, (6, 160))
    reference = [full_recompute(directory, None, row.tolist()) for row in tokens]

    def compare(logits: torch.Tensor, where: list[tuple[int, int]]) -> None:
        assert len(logits) == len(where)
        for row, (slot, position) in zip(torch.log_softmax(logits, -1), where, strict=True):
            torch.testing.assert_close(row, reference[slot][position], atol=1e-4, rtol=0)

    with torch.inference_mode():
        # A first piece that does not complete its history samples nothing.
        logits = forward.logits(weights, tokens[4, :90].copy(), NOTHING, NOTHING, [Piece(4, 0, 90, completes=False)])
        assert logits.shape == (0, VOCAB_SIZE)
        pieces = [Piece(4, 90, 130, True), Piece(0, 0, 3, True), Piece(2, 0, 50, False), Piece(1, 0, 140, True)]
        packed = np.concatenate([tokens[p.slot, p.start : p.end] for p in pieces])
        compare(forward.logits(weights, packed, NOTHING, NOTHING, pieces), [(4, 129), (0, 2), (1, 139)])
        # Singles beside pieces: the slots' own next tokens.
        singles, positions = np.array([0, 1, 4]), np.array([3, 140, 130])
        pieces = [Piece(2, 50, 60, True), Piece(3, 0, 5, True), Piece(5, 0, 7, True)]
        packed = np.concatenate([tokens[singles, positions], *(tokens[p.slot, p.start : p.end] for p in pieces)])
        compare(
            forward.logits(weights, packed, singles, positions, pieces),
            [(0, 3), (1, 140), (4, 130), (2, 59), (3, 4), (5, 6)],
        )
        # All slots, then two far apart, then one.
        for singles, positions in (
            (np.arange(6), np.array([4, 141, 60, 5, 131, 7])),
            (np.array([0, 5]), np.array([5, 8])),
            (np.array([3]), np.array([6])),
        ):
            logits = forward.logits(weights, tokens[singles, positions], singles, positions, [])
            compare(logits, list(zip(singles.tolist(), positions.tolist(), strict=True)))


@pytest.mark.parametrize("call_ns", [0.0, 1e12])
def test_any_plan_of_single_attention_gives_the_same(
    call_ns: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call per slot, and one call over the whole range, idle slots included."""
    directory = write_model(tmp_path)
    layout = read_layout(directory)
    weights = fuse_weights(layout, PublishedVersions(directory).fetch(0), version=0)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, (8, 40))
    slots, positions = np.array([1, 2, 6]), np.array([20, 30, 10])
    monkeypatch.setattr(SingleAttention, "CALL_NS", call_ns)
    forward = LocalForward(layout, num_slots=8, context_length=64)
    with torch.inference_mode():
        for slot, end in zip(slots.tolist(), positions.tolist(), strict=True):
            forward.logits(weights, tokens[slot, :end].copy(), NOTHING, NOTHING, [Piece(slot, 0, end, True)])
        logits = forward.logits(weights, tokens[slots, positions], slots, positions, [])
    for row, slot, position in zip(torch.log_softmax(logits, -1), slots.tolist(), positions.tolist(), strict=True):
        expected = full_recompute(directory, None, tokens[slot].tolist())[position]
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)


def test_attention_is_cut_where_padding_would_cost_more_than_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingleAttention, "CALL_NS", 100.0)
    monkeypatch.setattr(SingleAttention, "NS_PER_VALUE", 0.1)
    plan = SingleAttention._plan
    assert plan([0, 1, 2, 3], [20, 21, 20, 22], values_per_position=10) == [(0, 4, 22)]
    assert plan([0, 1, 2, 3], [20, 20, 200, 200], values_per_position=10) == [(0, 2, 20), (2, 4, 200)]
    assert plan([0, 40], [20, 20], values_per_position=10) == [(0, 1, 20), (40, 41, 20)]
    assert plan([], [], values_per_position=10) == []


def test_a_copied_prefix_is_the_computed_one(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    layout = read_layout(directory)
    weights = fuse_weights(layout, PublishedVersions(directory).fetch(0), version=0)
    forward = LocalForward(layout, num_slots=2, context_length=64)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 40)
    with torch.inference_mode():
        whole = forward.logits(weights, tokens, NOTHING, NOTHING, [Piece(0, 0, 40, True)])
        forward.copy_prefix(0, 1, 0, 30)
        rest = forward.logits(weights, tokens[30:], NOTHING, NOTHING, [Piece(1, 30, 40, True)])
    torch.testing.assert_close(whole, rest, atol=1e-5, rtol=0)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """S24: one tensor's name unmatched, one missing, a tied head that is another matrix, a wrong shape."""
    directory = write_model(tmp_path / "tied")
    layout = read_layout(directory)
    tensors = PublishedVersions(directory).fetch(0)
    fuse_weights(layout, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, 0)
    with pytest.raises(ValueError, match=r"version 4 .*unmatched \['model.norm.weights'\]"):
        fuse_weights(layout, {**tensors, "model.norm.weights": tensors["model.norm.weight"]}, 4)
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\] \(1 in all\)"):
        fuse_weights(layout, {name: t for name, t in tensors.items() if name != "model.norm.weight"}, 4)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        fuse_weights(layout, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, 4)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\)"):
        fuse_weights(layout, {**tensors, "model.norm.weight": torch.ones(3)}, 4)
    untied = read_layout(write_model(tmp_path / "untied", "llama-untied"))
    tensors = PublishedVersions(tmp_path / "untied").fetch(0)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing \['lm_head.weight'\]"):
        fuse_weights(untied, tensors, 1)


def test_models_that_cannot_be_run_are_refused_with_the_setting(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    with pytest.raises(ValueError, match=r"hidden_act is 'gelu'; the local engine runs 'silu' only"):
        read_layout(edited(directory, hidden_act="gelu"))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match=r"rope_parameters.rope_type is 'dynamic'"):
        read_layout(edited(directory, hidden_act="silu", rope_parameters=rope))
    with pytest.raises(ValueError, match=r"layer_types is 'sliding_attention'"):
        read_layout(
            edited(
                directory,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                layer_types=["full_attention", "sliding_attention"],
                use_sliding_window=True,
                sliding_window=16,
            )
        )
    with pytest.raises(ValueError, match="holds a GPT2LMHeadModel; supported architectures"):
        read_layout(edited(directory, architectures=["GPT2LMHeadModel"]))
