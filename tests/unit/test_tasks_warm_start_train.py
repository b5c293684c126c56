"""The warm start as a whole, at a size that takes seconds: it learns, repeats, publishes and is found again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from resources.environments.family import FamilyConfig
from resources.object_store import ObjectStore
from resources.policy.chat_format import ChatFormat
from resources.policy.config import PolicyConfig
from tasks.training.packing import PackableSequence
from tasks.warm_start.artifact import find_warm_start, warm_start_directory, warm_start_key
from tasks.warm_start.cloning import BehaviourCloning, learning_rate_at
from tasks.warm_start.config import WarmStartConfig
from tasks.warm_start.digest import warm_start_digest
from tasks.warm_start.train import train_warm_start
from tests.unit.test_tasks_training_model import make_model_directory

GUESS = {"guess_number": FamilyConfig(environment="guess_number", hardware_class="bandwidth")}
SMALL = PolicyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)
SHORT = WarmStartConfig(num_steps=12, learning_rate=1e-2, warmup_steps=2, episodes_per_step={"guess_number": 4})


def test_it_learns_publishes_and_repeats(tmp_path: Path) -> None:
    store, other = ObjectStore.open(str(tmp_path / "a")), ObjectStore.open(str(tmp_path / "b"))
    seen: list[tuple[int, int, float]] = []
    digest = warm_start_digest(SMALL, GUESS, SHORT, 3)
    assert find_warm_start(store, digest) is None
    report = train_warm_start(SMALL, GUESS, SHORT, 3, store, lambda *step: seen.append(step))
    assert report.digest == digest
    assert [done for done, _, _ in seen] == list(range(1, 13)) and seen[0][1] == 12
    assert seen[-1][2] < 0.7 * seen[0][2]
    assert report.num_episodes == 48 and 0.2 < report.data_success["guess_number"] < 0.9

    manifest = find_warm_start(store, digest)
    assert manifest is not None and manifest["report"]["loss"] == report.loss
    directory = warm_start_directory(store, digest, tmp_path / "unused")
    assert directory == store.local_path(warm_start_key(digest)) and not (tmp_path / "unused").exists()
    ChatFormat.from_directory(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.tie_word_embeddings

    train_warm_start(SMALL, GUESS, SHORT, 3, other)
    weights = f"{warm_start_key(digest)}/model.safetensors"
    assert store.get(weights) == other.get(weights)


def test_a_damaged_warm_start_is_refused(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    store.put("warm_starts/abc/config.json", b"{}")
    store.put_json(
        "warm_starts/abc/manifest.json", {"files": {"config.json": {"num_bytes": 2, "sha256": "0" * 64}}, "report": {}}
    )
    with pytest.raises(ValueError, match="does not match its manifest"):
        warm_start_directory(store, "abc", tmp_path)
    with pytest.raises(KeyError):
        warm_start_directory(store, "absent", tmp_path)


def test_the_digest_changes_with_what_matters_and_with_nothing_else(tmp_path: Path) -> None:
    base = warm_start_digest(SMALL, GUESS, SHORT, 0)
    elsewhere = {"guess_number": GUESS["guess_number"].model_copy(update={"hardware_class": "x", "group_size": 2})}
    assert warm_start_digest(SMALL, elsewhere, SHORT, 0) == base
    assert len(base) == 16 and int(base, 16) >= 0
    harder = {"guess_number": GUESS["guess_number"].model_copy(update={"arguments": {"highest": 3}})}
    other_noise = SHORT.model_copy(update={"p_random": {"guess_number": 0.1}})
    unused_noise = SHORT.model_copy(update={"p_random": {**SHORT.p_random, "calculator": 0.9}})
    assert warm_start_digest(SMALL, GUESS, unused_noise, 0) == base
    directory = make_model_directory(tmp_path)
    own_model = SMALL.model_copy(update={"model_directory": str(directory)})
    others = {
        warm_start_digest(SMALL, GUESS, SHORT, 1),
        warm_start_digest(SMALL, GUESS, SHORT, 0, code_version="other"),
        warm_start_digest(SMALL, harder, SHORT, 0),
        warm_start_digest(SMALL, GUESS, other_noise, 0),
        warm_start_digest(SMALL.model_copy(update={"hidden_size": 64}), GUESS, SHORT, 0),
        warm_start_digest(own_model, GUESS, SHORT, 0),
    }
    before = warm_start_digest(own_model, GUESS, SHORT, 0)
    (directory / "chat_template.jinja").write_text("another")
    others.add(warm_start_digest(own_model, GUESS, SHORT, 0))
    assert len(others) == 7 and base not in others and before in others


def test_schedule_by_hand() -> None:
    config = WarmStartConfig(num_steps=8, learning_rate=1.0, warmup_steps=2, decay_fraction=0.5)
    assert [round(learning_rate_at(step, config), 6) for step in range(8)] == [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]


def test_a_step_is_the_token_mean_whatever_the_micro_batches(tmp_path: Path) -> None:
    from tasks.training.model import load_policy

    rng = np.random.default_rng(0)
    rows = [PackableSequence(rng.integers(0, 40, n), np.arange(n) > n // 2) for n in (6, 11, 20)]
    results = []
    for budget in (1, 1000):
        model = load_policy(make_model_directory(tmp_path / str(budget)), "packed", "cpu")
        cloning = BehaviourCloning(model, WarmStartConfig(max_tokens_per_microbatch=budget, weight_decay=0.0))
        loss = cloning.step(rows)
        results.append((loss, torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    # AdamW's first step is the sign of the gradient, so only nearly-zero gradients may come out differently.
    assert float((results[0][1] - results[1][1]).abs().mean()) < 1e-7


def test_episodes_without_an_action_are_refused(tmp_path: Path) -> None:
    from tasks.training.model import load_policy

    cloning = BehaviourCloning(load_policy(make_model_directory(tmp_path), "packed", "cpu"), WarmStartConfig())
    with pytest.raises(ValueError, match="hold no action token"):
        cloning.step([PackableSequence(np.arange(5), np.zeros(5, np.bool_))])


def test_the_report_is_json(tmp_path: Path) -> None:
    from dataclasses import asdict

    store = ObjectStore.open(str(tmp_path))
    report = train_warm_start(SMALL, GUESS, SHORT.model_copy(update={"num_steps": 1}), 0, store)
    assert json.loads(json.dumps(asdict(report), allow_nan=False))["num_episodes"] == 4
