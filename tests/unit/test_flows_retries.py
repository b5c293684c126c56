"""Which failures of a stage are losses, and how often is it run again?"""

from __future__ import annotations

from typing import Any, cast

import pytest
from distributed.client import FutureCancelledError

import flows.retries
from flows.retries import run_stage, tolerate_loss
from resources.failures import DeadlineExceeded, InfrastructureFailure
from resources.runs import RunRef

RUN = RunRef(run_id="run", store_url="file:///nowhere")


class FailingStage:
    """A task whose attempts fail with these errors, then succeed."""

    name = "update"

    def __init__(self, *errors: Exception):
        self.errors = list(errors)
        self.num_submitted = 0

    def submit(self, run, *arguments):
        self.num_submitted += 1
        return self

    def result(self):
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    lines: list[str] = []

    class Logger:
        def warning(self, text, *arguments):
            lines.append(text % arguments)

    monkeypatch.setattr(flows.retries, "get_run_logger", Logger)
    return lines


def attempt(stage: FailingStage, retries: int = 2, wait=lambda service_id, limit_s: None) -> Any:
    return run_stage(cast(Any, stage), RUN, 4, retries=retries, recovery_s=60.0, wait=wait, sleep=lambda s: None)


def test_a_stage_that_lost_its_worker_is_run_again_when_the_run_is_whole(lines):
    waits = []
    stage = FailingStage(InfrastructureFailure("its worker learner-0 died"))
    assert attempt(stage, wait=lambda service_id, limit_s: waits.append((service_id, limit_s))) == "done"
    assert waits == [("run", 60.0)]
    assert lines == ["update: its worker learner-0 died; it is run again"]


def test_retries_are_bounded(lines):
    stage = FailingStage(*(InfrastructureFailure(f"death {n}") for n in range(3)))
    with pytest.raises(InfrastructureFailure, match="death 2"):
        attempt(stage)
    assert stage.num_submitted == 3


@pytest.mark.parametrize("error", [ValueError("batch 3 is not the next one"), DeadlineExceeded("not within 900 s")])
def test_what_is_no_loss_is_raised_at_once(lines, error):
    stage = FailingStage(error)
    with pytest.raises(type(error)):
        attempt(stage)
    assert stage.num_submitted == 1 and not lines


def test_a_stage_that_was_cancelled_with_its_cluster_is_not_run_again(lines):
    """An interrupted run closes its clients under the stages: that must not look like the death of a worker."""
    failure = InfrastructureFailure("task update could not run")
    failure.__cause__ = FutureCancelledError("update", "the client was closed")
    with pytest.raises(InfrastructureFailure):
        attempt(FailingStage(failure))
    assert not lines


def test_why_the_run_cannot_be_made_whole_is_what_is_raised(lines):
    def give_up(service_id, limit_s):
        raise InfrastructureFailure("the group queue cannot be rebuilt")

    with pytest.raises(InfrastructureFailure, match="cannot be rebuilt"):
        attempt(FailingStage(InfrastructureFailure("gone")), wait=give_up)


def test_what_only_works_ahead_may_be_lost_and_nothing_else(lines):
    tolerate_loss(FailingStage())
    assert lines == []
    tolerate_loss(FailingStage(InfrastructureFailure("its worker learner-0 died")))
    assert lines == ["its worker learner-0 died; the stage behind it does everything itself"]
    with pytest.raises(ValueError, match="reward is nan"):
        tolerate_loss(FailingStage(ValueError("trajectory run/a-0/0/0: reward is nan")))
