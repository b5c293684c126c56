"""The comparison with TRL: what is measured, what the sides are told, and that they play the same tokens."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from benchmarks.peers import LOOP_SIDES, ROLLART, TRL_SIDES, Side, headline_of, rows_of
from benchmarks.peers_episode import Episode
from benchmarks.peers_sides import SideFailed, process_environment, record_of, run_process
from benchmarks.peers_spec import PeerResult, PeerSpec, UpdateRecord, summarise
from benchmarks.peers_trl import TurnFormat, action_tokenizer
from resources.environments.base import Message
from resources.environments.family import FamilyConfig
from resources.environments.seeds import episode_seed
from resources.policy.chat_format import ChatFormat
from resources.policy.config import PolicyConfig
from resources.policy.tiny import create_tiny_policy
from tasks.training.config import TrainingConfig

LAKE = FamilyConfig(environment="frozen_lake", hardware_class="compute", groups_per_iteration=2)
SUM = FamilyConfig(environment="calculator", hardware_class="compute", groups_per_iteration=1, scorer="exact_answer")


def spec(**changes: object) -> PeerSpec:
    fields = {
        "model_directory": "/model",
        "output_directory": "/out",
        "families": {"lake": LAKE, "sum": SUM},
        "training": TrainingConfig(minibatches=4),
        "context_length": 64,
        "num_updates": 3,
        "num_threads": 1,
        "seed": 5,
    }
    return PeerSpec.model_validate({**fields, **changes})


def result(rate: float, success: float = 0.5) -> PeerResult:
    """Three updates of 10 trajectories; the first takes 100 s, the others ``10 / rate`` each."""
    ends = [100.0, 100.0 + 10 / rate, 100.0 + 20 / rate]
    return PeerResult(
        updates=[
            UpdateRecord(ended_at_s=end, num_trajectories=10, num_sampled_tokens=30, success={"lake": success})
            for end in ends
        ],
        model_directory="/out",
    )


def side(*rates: float) -> Side:
    measured = Side(success={"lake": 0.25, "sum": 0.75})
    for rate in rates:
        measured.add((result(rate), 130.0))
    return measured


def test_rate_leaves_out_the_first_update() -> None:
    assert result(4.0).trajectories_per_s() == pytest.approx(4.0)
    assert result(4.0).tokens_per_s() == pytest.approx(12.0)
    with pytest.raises(ValueError, match="needs at least two"):
        PeerResult(updates=result(4.0).updates[:1], model_directory="/out").trajectories_per_s()


def test_headline_compares_with_the_best_of_trl_and_with_two_perfect_cores() -> None:
    sides = {
        TRL_SIDES[0]: side(30.0),
        TRL_SIDES[1]: side(40.0, 50.0, 90.0),
        LOOP_SIDES[0]: side(100.0),
        LOOP_SIDES[1]: side(120.0),
        ROLLART: side(150.0),
    }
    headline = headline_of(sides)
    ratio = headline["trajectories_per_s_vs_trl"]
    assert ratio["value"] == pytest.approx(150 / 50)
    assert ratio["bound"] == pytest.approx(2 * 100 / 50)
    assert headline["trajectories_per_s"]["bound"] == pytest.approx(200)
    assert headline["trajectories_per_s_vs_loop"]["value"] == pytest.approx(150 / 120)


def test_a_row_says_rate_start_up_and_success() -> None:
    start, row = rows_of({ROLLART: side(1.0, 2.0, 4.0)}, {"lake": 0.0, "sum": 0.5})
    assert start["success"] == pytest.approx(0.25)
    assert row["trajectories_per_s"] == pytest.approx(2.0)
    assert row["rounds"] == "1.0 2.0 4.0"
    assert row["start_s"] == pytest.approx(120.0)  # 130 s in all, of which 20 trajectories at 2 a second
    assert row["success"] == pytest.approx(0.5)
    assert row["by_family"] == "lake 0.25, sum 0.75"


def test_every_update_plays_the_train_episodes_of_a_run_with_this_seed() -> None:
    asked = spec()
    assert asked.groups(1) == [
        ("lake", episode_seed(5, "lake", 2, "train")),
        ("lake", episode_seed(5, "lake", 3, "train")),
        ("sum", episode_seed(5, "sum", 1, "train")),
    ]
    assert asked.trajectories_per_update == 24


def test_what_trl_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group sizes are .*they must be equal"):
        spec(families={"lake": LAKE, "sum": SUM.model_copy(update={"group_size": 4})})
    with pytest.raises(ValueError, match="minibatches is 5; it must divide the 24"):
        spec(training=TrainingConfig(minibatches=5))


def test_record_of_a_metrics_row() -> None:
    row = {
        "recorded_at": 7.5,
        "num_trajectories": 24,
        "num_sampled_tokens": 90,
        "success/lake": 0.5,
        "reward/lake": 0.4,
    }
    assert record_of(row) == UpdateRecord(
        ended_at_s=7.5, num_trajectories=24, num_sampled_tokens=90, success={"lake": 0.5}
    )


def test_an_episode_is_judged_by_its_scorer_and_pays_for_malformed_actions() -> None:
    async def play(actions: list[str]) -> tuple[float, bool, int]:
        episode = Episode("sum", SUM)
        await episode.start(3)
        for action in actions:
            await episode.act(action)
        assert episode.over
        outcome = await episode.outcome()
        return outcome.reward, outcome.success, outcome.num_turns

    async def expected() -> str:
        from resources.environments.calculator import Calculator

        calculator = Calculator()
        await calculator.reset(3)
        return str(calculator.judgement()["expected"])

    answer = f"<answer>{asyncio.run(expected())}</answer>"
    assert asyncio.run(play(["nonsense", answer])) == (pytest.approx(0.9), True, 2)
    assert asyncio.run(play(["nonsense", "nonsense", "nonsense"])) == (pytest.approx(-0.3), False, 3)


def test_summarise_counts_by_family() -> None:
    class Outcome:
        def __init__(self, family: str, success: bool) -> None:
            self.family, self.success = family, success

    record = summarise([Outcome("lake", True), Outcome("lake", False), Outcome("sum", True)], 2.0, 9)
    assert record.success == {"lake": 0.5, "sum": 1.0}
    assert (record.num_trajectories, record.num_sampled_tokens) == (3, 9)


def test_trl_is_given_the_tokens_of_the_other_sides(tmp_path: Path) -> None:
    """M15, M16: what TRL's template yields for opening and observation is what `ChatFormat` yields."""
    corpus = ["lake: <act>left</act>, down, right or up", "row 0 col 1 left S down F right # up #"] * 4
    create_tiny_policy(tmp_path, PolicyConfig(hidden_size=8, num_layers=1, context_length=64), corpus, seed=0)
    chat = ChatFormat.from_directory(tmp_path)
    turns, tokenizer = TurnFormat(chat), action_tokenizer(chat)
    messages = [Message(role="system", content="lake: left"), Message(role="user", content="row 0 col 1")]
    opening = [{"role": "user", "content": turns.opening(messages)}]
    ids = tokenizer.apply_chat_template(opening, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert ids == chat.opening(messages).tolist()

    call = {"type": "function", "function": {"name": "act", "arguments": {}}}
    dummy = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    stop, other = chat.stop_token_ids[0], chat.tokenizer.encode("left", add_special_tokens=False)[0]
    for last in (stop, other):  # a turn that ended by itself, and one that was cut
        observation = [Message(role="user", content="row 1 col 1 left F")]
        answer = {"role": "tool", "name": "act", "content": turns.continuation(observation, last)}
        prefix = tokenizer.apply_chat_template(dummy, tokenize=True, return_dict=False)
        whole = tokenizer.apply_chat_template([*dummy, answer], tokenize=True, return_dict=False)
        assert whole[: len(prefix)] == prefix and prefix[-1] == stop
        assert whole[len(prefix) :] == chat.continuation(observation, last).tolist()

    action = chat.tokenizer.encode("<act>left</act>", add_special_tokens=False)
    parsed = tokenizer.parse_response([*action, stop], prefix=ids)
    assert parsed["tool_calls"][0]["function"] == {
        "name": "act",
        "arguments": {"action": "<act>left</act>", "last_token_id": stop},
    }


def test_a_side_that_fails_says_what_it_said(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no luck today'); raise SystemExit(3)"]
    with pytest.raises(SideFailed, match=r"(?s)the side ended with code 3.*no luck today"):
        run_process("the side", command, process_environment(1), tmp_path / "log", timeout_s=60)


def test_a_side_past_its_deadline_is_ended(tmp_path: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    log = tmp_path / "log"
    with pytest.raises(SideFailed, match="was not done after"):
        run_process("the side", [sys.executable, "-c", program], process_environment(1), log, timeout_s=2)
    pid = log.read_text().split()
    assert not pid or not Path(f"/proc/{pid[0]}").exists()


def test_specs_and_results_survive_json() -> None:
    assert PeerSpec.model_validate_json(spec().model_dump_json()) == spec()
    assert PeerResult.model_validate(json.loads(result(2.0).model_dump_json())) == result(2.0)
