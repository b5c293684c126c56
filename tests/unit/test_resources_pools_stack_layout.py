"""Where the files of a local stack lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from resources.pools.prefect_processes import (
    save_template,
    server_command,
    template_database,
    use_template,
    worker_command,
)
from resources.pools.stack_command import parse_work_pool
from resources.pools.stack_layout import MAX_SOCKET_PATH_BYTES, StackLayout


def test_folders_are_made_and_everything_lies_in_them(tmp_path: Path) -> None:
    layout = StackLayout.prepare(tmp_path / "a" / "state")
    assert layout.database == tmp_path / "a" / "state" / "prefect" / "prefect.db"
    assert layout.logs.is_dir() and layout.prefect_home.is_dir()
    assert layout.tail("prefect-server") == "(no log)"
    layout.log("prefect-server").write_text("\n".join(str(line) for line in range(100)))
    assert layout.tail("prefect-server", lines=2) == "98\n99"


def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the state folder .*/file/state cannot be written"):
        StackLayout.prepare(tmp_path / "file" / "state")


def test_long_paths_get_a_short_socket_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    long = Path("/srv") / ("x" * 200)
    socket = StackLayout(long).socket()
    assert socket.parent.parent == tmp_path
    assert socket == StackLayout(long).socket()
    assert socket != StackLayout(long / "other").socket()
    assert socket.parent.stat().st_mode & 0o777 == 0o700
    assert StackLayout(Path("/srv/short")).socket() == Path("/srv/short/supervisor.sock")
    assert len(str(StackLayout(Path("/srv/short")).socket())) <= MAX_SOCKET_PATH_BYTES


def test_a_socket_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    long = StackLayout(Path("/srv") / ("x" * 200))
    long.socket().parent.chmod(0o755)
    with pytest.raises(ValueError, match="must be a folder of this user only"):
        long.socket()


def test_processes_do_not_follow_the_callers_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
    monkeypatch.delenv("PREFECT_API_DATABASE_CONNECTION_URL", raising=False)
    layout = StackLayout(tmp_path)
    server = server_command(layout, 4201)
    assert server.arguments[-4:] == ("--host", "127.0.0.1", "--port", "4201")
    assert "--no-services" not in server.arguments  # it would drop the recorder of task runs
    assert "PREFECT_API_URL" not in server.env
    assert server.env["PREFECT_API_DATABASE_CONNECTION_URL"] == f"sqlite+aiosqlite:///{tmp_path}/prefect/prefect.db"
    worker = worker_command(layout, "http://127.0.0.1:4201/api", "rewards", 3)
    assert worker.env["PREFECT_API_URL"] == "http://127.0.0.1:4201/api"
    assert worker.name == "worker-rewards"
    assert worker.arguments[worker.arguments.index("--limit") :][:2] == ("--limit", "3")


def test_a_fresh_state_takes_the_template_and_history_never_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    migrated, database = tmp_path / "migrated.db", tmp_path / "prefect.db"
    assert use_template(database) is False
    with sqlite3.connect(migrated) as connection:
        connection.execute("create table run (id)")
    connection.close()
    save_template(migrated)
    assert template_database().stat().st_mode & 0o777 == 0o600
    assert use_template(database) is True
    database.write_bytes(b"history")
    assert use_template(database) is False
    assert database.read_bytes() == b"history"


def test_work_pools_are_names_with_limits() -> None:
    assert parse_work_pool("rewards=4") == ("rewards", 4)
