"""Who is called dead, and what is set to Crashed behind them? The server is written by hand."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID, uuid4

import httpx
import psutil
import pytest
from prefect.client.schemas.objects import StateType

import flows.drivers
from flows.drivers import crash_orphans, main


@dataclass
class WrittenServer:
    """Flow runs by id, and what was set to Crashed."""

    flow_runs: dict[UUID, StateType] = field(default_factory=dict)
    children: dict[UUID, list[UUID]] = field(default_factory=dict)
    crashed: list[UUID] = field(default_factory=list)
    messages: set[str] = field(default_factory=set)
    is_gone: bool = False

    def __enter__(self):
        return self

    def __exit__(self, *exception): ...

    def read_flow_runs(self, flow_run_filter):
        if self.is_gone:
            raise httpx.ConnectError("connection refused")
        if flow_run_filter.parent_flow_run_id is not None:
            (parent,) = flow_run_filter.parent_flow_run_id.any_
            ids = self.children.get(parent, [])
        else:
            ids = flow_run_filter.id.any_
        return [SimpleNamespace(id=each, state_type=self.flow_runs[each]) for each in ids if each in self.flow_runs]

    def read_task_runs(self, flow_run_filter, task_run_filter):
        (of,) = flow_run_filter.id.any_
        return [SimpleNamespace(id=UUID(int=of.int + 1))]

    def set_flow_run_state(self, flow_run_id, state, force):
        assert state.type is StateType.CRASHED and force
        self.crashed.append(flow_run_id)
        self.messages.add(state.message)

    set_task_run_state = set_flow_run_state


@pytest.fixture
def server(monkeypatch) -> WrittenServer:
    server = WrittenServer()
    monkeypatch.setattr(flows.drivers, "get_client", lambda sync_client: server)
    return server


def note(state, pid: int, started_at: float, host: str = "", flow_run_id: UUID | None = None) -> UUID:
    flow_run_id = flow_run_id or uuid4()
    path = state / "drivers" / f"{flow_run_id}.json"
    path.parent.mkdir(exist_ok=True)
    record = {"run_id": "mine-1", "store": "s", "flow_run_id": str(flow_run_id), "pid": pid, "started_at": started_at}
    path.write_text(json.dumps({**record, "host": host or socket.gethostname()}))
    return flow_run_id


def dead_pid() -> int:
    return next(pid for pid in range(100_000, 4_000_000) if not psutil.pid_exists(pid))


def test_flow_runs_of_a_dead_driver_are_crashed_children_first(tmp_path, server):
    train, iteration, done = uuid4(), uuid4(), uuid4()
    server.flow_runs = {train: StateType.RUNNING, iteration: StateType.RUNNING, done: StateType.COMPLETED}
    server.children = {train: [iteration, done]}
    note(tmp_path, dead_pid(), 0.0, flow_run_id=train)
    (line,) = crash_orphans(tmp_path)
    assert server.crashed == [UUID(int=iteration.int + 1), iteration, UUID(int=train.int + 1), train]
    (message,) = server.messages
    assert "was killed; resume the run with --resume mine-1" in message and message in line
    assert crash_orphans(tmp_path) == [], "once"


def test_a_living_driver_is_never_touched(tmp_path, server):
    me = psutil.Process(os.getpid())
    server.flow_runs = {note(tmp_path, me.pid, me.create_time()): StateType.RUNNING}
    assert crash_orphans(tmp_path) == [] and server.crashed == []


def test_a_pid_that_belongs_to_another_process_by_now_is_a_dead_driver(tmp_path, server):
    flow_run = note(tmp_path, os.getpid(), psutil.Process().create_time() - 3600)
    server.flow_runs = {flow_run: StateType.RUNNING}
    assert len(crash_orphans(tmp_path)) == 1 and flow_run in server.crashed


def test_drivers_of_other_hosts_and_runs_of_other_servers_are_left_alone(tmp_path, server):
    elsewhere = note(tmp_path, dead_pid(), 0.0, host="elsewhere")
    note(tmp_path, dead_pid(), 0.0)
    server.flow_runs = {elsewhere: StateType.RUNNING}
    assert crash_orphans(tmp_path) == [] and server.crashed == []
    assert len(list((tmp_path / "drivers").iterdir())) == 2


def test_what_had_ended_stays_as_it_was(tmp_path, server):
    server.flow_runs = {note(tmp_path, dead_pid(), 0.0): StateType.COMPLETED}
    crash_orphans(tmp_path)
    assert server.crashed == []


def test_a_server_that_does_not_answer_keeps_the_record(tmp_path, server):
    server.is_gone = True
    note(tmp_path, dead_pid(), 0.0)
    (line,) = crash_orphans(tmp_path)
    assert "could not be set to Crashed: connection refused" in line
    assert len(list((tmp_path / "drivers").iterdir())) == 1


def test_make_up_says_what_it_cleared_up(tmp_path, server, capsys):
    train = uuid4()
    server.flow_runs = {train: StateType.RUNNING}
    note(tmp_path, dead_pid(), 0.0, flow_run_id=train)
    main([str(tmp_path)])
    assert f"flow run {train} is set to Crashed" in capsys.readouterr().out
    assert train in server.crashed
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    assert '$(BIN)/python -m flows.drivers "$$state"' in makefile
