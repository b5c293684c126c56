"""Did the code pass? Splits tests into what the sandbox may know and what it may not, and judges its report.

``assert <expression> == <literal>`` is judged here, by value: the sandbox evaluates the expression and reports a plain
literal, and never learns the expected one. Such a test cannot be passed by ending the process, by printing a success,
by an object that equals everything, or by forging the report. Any other statement is run inside as it stands, beside
the code; that resists the same accidents, but code written to take over the reporting process could forge its verdict.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any

MAX_MESSAGE_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """What one call found out. A pure function of code and tests, but for ``timed_out``, ``duration_s`` and
    ``cached``."""

    passed: bool
    """Every test passed, and there was at least one."""
    message: str
    """First failure in one line of at most 200 characters, e.g. ``larger(3,5) gave 3, want 5``; empty when passed."""
    timed_out: bool = False
    num_passed: int = 0
    num_tests: int = 0
    duration_s: float = 0.0
    """Seconds inside the sandbox."""
    cached: bool = False


@dataclass(frozen=True, slots=True)
class Test:
    """One parsed test."""

    __test__ = False  # not a test class of pytest

    source: str
    expression: str | None = None
    """Set for ``assert expression == literal``: only this enters the sandbox."""
    expected: Any = None

    def probe(self) -> dict[str, str]:
        if self.expression is None:
            return {"statement": self.source}
        return {"expression": f"({self.expression}\n)"}  # in brackets: an expression may span lines


def parse_tests(tests: list[str] | str) -> list[Test]:
    """Tests from their source, one or more statements each. Raises ValueError for a test that is no Python, or for
    none."""
    sources = [tests] if isinstance(tests, str) else list(tests)
    if not sources:
        raise ValueError("tests is empty: with nothing to check nothing can pass; give at least one test")
    return [_parse_test(source) for source in sources]


def _parse_test(source: str) -> Test:
    if not isinstance(source, str):
        raise ValueError(f"tests holds {source!r}; each test must be a string such as 'assert f(1) == 2'")
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"tests holds {source!r}, which is no Python: {error}; write e.g. 'assert f(1) == 2'"
        ) from error
    if not body:
        raise ValueError(f"tests holds {source!r}, which checks nothing; write e.g. 'assert f(1) == 2'")
    match body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            try:
                text = ast.get_source_segment(source, left) or ast.unparse(left)
                return Test(source, expression=text, expected=ast.literal_eval(right))
            except ValueError:
                return Test(source)  # the right side is no literal: run the whole statement inside
    return Test(source)


def judge(tests: list[Test], reply: dict[str, Any], nonce: str) -> SandboxResult:
    """The verdict on one reply of the fork server; ``reply['report']`` is text written by untrusted code."""
    duration_s = float(reply["duration_s"])

    def failed(message: str, num_passed: int = 0, timed_out: bool = False) -> SandboxResult:
        message = message.replace("\n", " ")
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = message[: MAX_MESSAGE_CHARACTERS - 3] + "..."
        return SandboxResult(False, message, timed_out, num_passed, len(tests), duration_s)

    if reply["state"] == "timed_out":
        return failed("ran past its deadline", timed_out=True)
    if reply["state"] != "finished":
        return failed("reported more than is allowed")
    report = _read_report(reply["report"], nonce)
    if report is None:
        return failed(f"ended before its tests did (exit code {reply['exit_code']})")
    if "code_error" in report:
        return failed(str(report["code_error"]))
    results = report.get("results")
    if not isinstance(results, list) or len(results) != len(tests):
        return failed("reported on other tests than were asked")
    messages = [_failure_of(test, result) for test, result in zip(tests, results, strict=True)]
    failures = [message for message in messages if message is not None]
    if failures:
        return failed(failures[0], num_passed=len(tests) - len(failures))
    return SandboxResult(True, "", False, len(tests), len(tests), duration_s)


def _read_report(text: str, nonce: str) -> dict[str, Any] | None:
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) and report.get("nonce") == nonce else None


def _failure_of(test: Test, result: Any) -> str | None:
    """None when the test passed, else the message."""
    subject = test.expression or test.source
    if not isinstance(result, dict):
        return f"{subject}: no result"
    if "error" in result:
        return f"{subject}: {result['error']}"
    if test.expression is None:
        return None if result.get("passed") is True else f"{subject}: no result"
    text = str(result.get("value"))
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return f"{subject} gave {text}, want {test.expected!r}"  # e.g. nan, inf: no literal, equal to no literal
    return None if value == test.expected else f"{subject} gave {text}, want {test.expected!r}"
