"""How a crash below Prefect is told to the server, whatever the dead worker had announced to it."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import task
from prefect.exceptions import PrefectHTTPStatusError

import flows.task_runner
from flows.task_runner import PoolFuture
from resources.failures import InfrastructureFailure

RUN = UUID(int=7)


class LostFuture:
    """Of a task whose worker died."""

    def result(self, timeout: float | None = None) -> Any:
        raise ConnectionResetError("the worker is gone")


def answer(status: int) -> PrefectHTTPStatusError:
    response = httpx.Response(status, request=httpx.Request("POST", "http://127.0.0.1/api"))
    return PrefectHTTPStatusError("no", request=response.request, response=response)


class ScriptedServer:
    """Answers calls with statuses, in order; 0: done."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.calls: list[tuple[str, str]] = []

    def _answer(self, what: str, state: Any) -> None:
        self.calls.append((what, state.name))
        if status := self.statuses.pop(0):
            raise answer(status)

    def set_task_run_state(self, task_run_id: UUID, state: Any, *, force: bool) -> None:
        assert task_run_id == RUN and force
        self._answer("set", state)

    def create_task_run(self, task: Any, flow_run_id: UUID, *, state: Any, id: UUID, **rest: Any) -> None:
        assert id == RUN
        self._answer("create", state)


def crash(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows.task_runner, "get_client", lambda *, sync_client: server)
    future = PoolFuture(RUN, cast(Any, LostFuture()), task(lambda: 1, name="die"), "learner", uuid4())
    with pytest.raises(InfrastructureFailure, match="task die could not run on hardware class learner: ConnectionRes"):
        future.result()
    assert server.statuses == []


@pytest.mark.parametrize(
    ("statuses", "calls"),
    [
        ([0], ["set"]),
        ([404, 0], ["set", "create"]),
        # The worker's own announcement was booked between the two.
        ([404, 409, 0], ["set", "create", "set"]),
    ],
)
def test_a_crash_is_told_whether_or_not_the_run_was_announced(
    statuses: list[int], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ScriptedServer(*statuses)
    crash(server, monkeypatch)
    assert server.calls == [(call, "Crashed") for call in calls]


@pytest.mark.parametrize("statuses", [[500], [404, 500], [404, 409] * 3])
def test_what_the_server_cannot_do_is_raised_after_a_few_attempts(
    statuses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PrefectHTTPStatusError):
        crash(ScriptedServer(*statuses), monkeypatch)
