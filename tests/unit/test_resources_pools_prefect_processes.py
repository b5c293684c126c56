"""How the processes of the local stack are started."""

from __future__ import annotations

from resources.pools.prefect_processes import server_command
from resources.pools.stack_layout import StackLayout


def test_the_ui_asks_the_server_that_serves_it_whatever_its_port(tmp_path, monkeypatch):
    """With Prefect's default the UI of a server on another port asks port 4200 for its data, and shows nothing."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    command = server_command(StackLayout.prepare(tmp_path), 43210)
    assert command.env["PREFECT_SERVER_UI_API_URL"] == "/api"
    assert "PREFECT_API_URL" not in command.env
    assert command.arguments[-1] == "43210"
