from __future__ import annotations

import pytest

from resources.rewards.base import ScoringRequest
from resources.rewards.scorers import resolve_scorer
from resources.rewards.scorers.unit_tests import UnitTestsScorer

ADD = "def add(a, b): return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def request(scorer: str, payload: dict, deadline_s: float = 10.0) -> ScoringRequest:
    return ScoringRequest("run/t", "family", scorer, "1", payload, deadline_s)


@pytest.mark.parametrize(
    ("answer", "expected", "success"),
    [
        ("282", "282", True),
        (282, "282", True),
        (" 282\n", "282", True),
        ("282.0", 282, True),
        ("0282", "282", True),
        ("-7", "7", False),
        ("281", "282", False),
        ("", "282", False),
        (None, "282", False),
        (None, "None", False),
        ("1e3", "1000", False),
        ("1e999999999", "1", False),
        ("NaN", "NaN", True),
        ("Paris", "paris", False),
        ("two  words", "two words", True),
    ],
)
def test_exact_answer(answer, expected, success):
    score = resolve_scorer("exact_answer").score(request("exact_answer", {"answer": answer, "expected": expected}))
    assert (score.reward, score.success, score.failure) == (float(success), success, None)
    assert score.components == {"outcome": float(success), "invalid_action": 0.0}
    assert (score.trajectory_id, score.scorer, score.scorer_version) == ("run/t", "exact_answer", "1")


def test_exact_answer_may_ignore_case():
    scorer = resolve_scorer("exact_answer", {"ignore_case": True})
    assert scorer.score(request("exact_answer", {"answer": "paris", "expected": "Paris"})).success is True


def test_malformed_actions_cost_a_tenth_each():
    payload = {"answer": "7", "expected": "7", "num_invalid_actions": 3}
    score = resolve_scorer("exact_answer").score(request("exact_answer", payload))
    assert score.reward == pytest.approx(0.7)
    assert score.components == {"outcome": 1.0, "invalid_action": pytest.approx(-0.3)}
    with pytest.raises(ValueError, match="num_invalid_actions is -1"):
        resolve_scorer("exact_answer").score(request("exact_answer", payload | {"num_invalid_actions": -1}))


def test_environment_passes_the_outcome_through():
    payload = {"reward": 0.8, "components": {"outcome": 1.0, "invalid_action": -0.2}, "success": True}
    scorer = resolve_scorer("environment")
    score = scorer.score(request("environment", payload))
    assert scorer.runs == "inline"
    assert (score.reward, score.success, score.components) == (0.8, True, payload["components"])


def test_unit_tests_run_in_the_sandbox():
    """S4: code that loops is the policy's own doing, and scored 0, not unscored."""
    scorer = resolve_scorer("unit_tests", {"test_deadline_s": 0.5})
    right = scorer.score(request("unit_tests", {"code": ADD, "tests": TESTS, "num_invalid_actions": 1}))
    assert (right.reward, right.success) == (pytest.approx(0.9), True)
    wrong = scorer.score(request("unit_tests", {"code": "def add(a, b): return a", "tests": TESTS}))
    assert (wrong.reward, wrong.success, wrong.failure) == (0.0, False, None)
    assert wrong.failure_message
    loops = scorer.score(request("unit_tests", {"code": "def add(a, b):\n  while True: pass", "tests": TESTS}))
    assert (loops.reward, loops.success, loops.failure) == (0.0, False, None)
    none = scorer.score(request("unit_tests", {"code": None, "tests": TESTS}))
    assert (none.reward, none.success, none.failure_message) == (0.0, False, "no code was given")


def test_the_tests_end_well_before_the_scorer_must(monkeypatch):
    asked = []

    class Passed:
        passed, message = True, ""

    def record(code, tests, *, deadline_s):
        asked.append(deadline_s)
        return Passed

    monkeypatch.setattr("resources.rewards.scorers.unit_tests.run_tests", record)
    for deadline_s in (4.0, 100.0):
        UnitTestsScorer(5.0).score(request("unit_tests", {"code": ADD, "tests": TESTS}, deadline_s))
    assert asked == [2.0, 5.0]


@pytest.mark.parametrize("name", ["exact_answer", "unit_tests", "environment"])
def test_a_payload_that_lacks_a_key_is_an_error(name):
    with pytest.raises(ValueError, match="payload of 'run/t'"):
        resolve_scorer(name).score(request(name, {}))


def test_a_scorer_of_ones_own_by_import_path():
    path = "tests.unit.misbehaving_scorers:EchoScorer"
    scorer = resolve_scorer(path, {"factor": 2.0})
    assert (scorer.name, scorer.runs) == (path, "pool")
    assert scorer.score(request(path, {"reward": 3.0})).reward == 6.0


def test_the_version_names_the_arguments():
    plain = resolve_scorer("exact_answer").version
    ignoring = resolve_scorer("exact_answer", {"ignore_case": True}).version
    assert plain == "1"
    assert ignoring.startswith("1+")
    assert ignoring != resolve_scorer("exact_answer", {"ignore_case": False}).version


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("exact_anwser", {}, r"'exact_anwser' is unknown; allowed: \['environment', 'exact_answer', 'unit_tests'\]"),
        ("no.such.module:Scorer", {}, "module 'no.such.module' cannot be imported"),
        ("resources.rewards.base:NoSuch", {}, "has no class 'NoSuch'"),
        ("resources.rewards.queue:Backlog", {}, "Backlog is no scorer; it needs name, version, runs"),
        ("exact_answer", {"ignore_cases": True}, "cannot be made with scorer_arguments {'ignore_cases': True}"),
        ("unit_tests", {"test_deadline_s": 0}, "test_deadline_s is 0; it must be positive"),
    ],
)  # fmt: skip
def test_a_scorer_that_cannot_be_had_is_refused(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_scorer(name, arguments)
