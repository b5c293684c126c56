"""How are a local Prefect server and its process workers started? By command line: these rooms never import Prefect."""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import shutil
import socket
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from resources.pools.stack_layout import StackLayout

HOST = "127.0.0.1"
REQUEST_S = 15
"""Longest wait for the server to answer a request."""
WORKER_QUERY_S = 2
"""How often a process worker asks for runs (Prefect's default is 10 s: longer than many a reward replica lives)."""


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """A process that the supervisor starts."""

    name: str
    """Also the name of its log file."""
    arguments: tuple[str, ...]
    env: Mapping[str, str]


def server_command(layout: StackLayout, port: int) -> ChildCommand:
    """The Prefect server, with its database in the state folder unless the environment names another one."""
    env = _without_client_settings(os.environ)
    env |= {"PREFECT_HOME": str(layout.prefect_home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    # Otherwise the UI asks the default port for its data. A relative address follows whatever name a browser uses.
    env.setdefault("PREFECT_SERVER_UI_API_URL", "/api")
    env.setdefault("PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT", "false")
    env.setdefault("PREFECT_API_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{layout.database}")
    command = (sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port))
    return ChildCommand("prefect-server", command, env)


def worker_command(layout: StackLayout, api_url: str, work_pool: str, limit: int) -> ChildCommand:
    """A process worker that runs at most ``limit`` flow runs of a work pool at once; it creates the pool if need be."""
    env = _without_client_settings(os.environ)
    env |= {
        "PREFECT_HOME": str(layout.prefect_home),
        "PREFECT_API_URL": api_url,
        "PREFECT_WORKER_QUERY_SECONDS": str(WORKER_QUERY_S),
    }
    command = (sys.executable, "-m", "prefect", "worker", "start", "--pool", work_pool, "--type", "process")
    command += ("--limit", str(limit), "--name", f"local-{work_pool}", "--install-policy", "never")
    return ChildCommand(f"worker-{work_pool}", command, env)


def is_healthy(port: int) -> bool:
    """Whether a Prefect server answers its health endpoint on this port."""
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def create_work_pool(port: int, name: str) -> None:
    """Create a process work pool, so that deployments can name it before its worker has started; one that is there
    already is fine.

    Raises:
        OSError: the server does not take it; the message holds its answer.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_S)
    try:
        body = json.dumps({"name": name, "type": "process"})
        connection.request("POST", "/api/work_pools/", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read().decode(errors="replace")
        if response.status not in (http.client.CREATED, http.client.CONFLICT):
            raise OSError(f"status {response.status}: {answer[:500]}")
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def is_free(port: int) -> bool:
    """Whether a server could listen on this port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def template_database() -> Path:
    """A migrated, empty database of the installed Prefect version: copying it spares a fresh server its migrations."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rollart" / f"prefect-{importlib.metadata.version('prefect')}.db"


def use_template(database: Path) -> bool:
    """Put the template in the place of a database that does not exist yet; whether it was there."""
    template = template_database()
    if database.exists() or not template.exists():
        return False
    partial = database.with_suffix(".partial")
    shutil.copyfile(template, partial)
    partial.replace(database)
    return True


def save_template(database: Path) -> None:
    """Keep a database that a server has just migrated, before anything is recorded in it."""
    template = template_database()
    template.parent.mkdir(parents=True, exist_ok=True)
    partial = template.with_suffix(f".{os.getpid()}.partial")
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(partial)) as target:
        source.backup(target)
    partial.chmod(0o600)
    partial.replace(template)


def _without_client_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The stack's processes follow no address or key that the caller's shell was set up for."""
    dropped = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_PROFILE", "PREFECT_API_AUTH_STRING")
    return {name: value for name, value in environ.items() if name not in dropped}
