"""Who owns the processes that runs share on one machine, and when do they end?

One supervisor per state folder owns a Prefect server, process workers and, for a standing stack, a Dask cluster. Every
driver holds a *lease*: a connection to the supervisor's socket. The kernel closes it however the driver goes, SIGKILL
included. When the last lease is gone, and nobody asked the stack to stand, the supervisor ends everything below it and
itself, within seconds. It lives in a session of its own, and orphaned descendants become its children, so that none
slips away; how its children are started and ended is in supervised_children.py.

Messages are lines of JSON: ``{"op": "lease" | "stand" | "status" | "down", ...}``, one answer each.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resources.pools.prefect_processes import (
    HOST,
    ChildCommand,
    create_work_pool,
    free_port,
    is_free,
    is_healthy,
    save_template,
    server_command,
    use_template,
    worker_command,
)
from resources.pools.processes import adopt_orphans, is_gone
from resources.pools.stack_layout import StackLayout
from resources.pools.supervised_children import SupervisedChildren

logger = logging.getLogger("supervisor")

TICK_S = 0.2
FIRST_LEASE_S = 15.0
"""A supervisor that nobody has leased after this time ends: its driver died while starting it."""
PREDECESSOR_S = 20.0
"""Longest wait for an earlier supervisor of the same state folder to end its processes."""


@dataclass
class Supervisor:
    """State of one stack; runs on one event loop."""

    layout: StackLayout
    port: int
    start_timeout_s: float
    leases: dict[asyncio.StreamWriter, int] = field(default_factory=dict)
    """Connection and pid of each driver."""
    standing: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    dask_address: str = ""

    def __post_init__(self) -> None:
        self.children = SupervisedChildren(self.layout)

    @property
    def api_url(self) -> str:
        return f"http://{HOST}:{self.port}/api"

    async def run(self) -> None:
        """Serve leases until the last one is gone, then end everything."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ending.set)
        path = self.layout.socket()
        path.unlink(missing_ok=True)
        listener = await asyncio.start_unix_server(self._serve, path=str(path))
        os.chmod(path, 0o600)
        starting = loop.create_task(self._start_server())
        watching = loop.create_task(self._watch())
        await self.ending.wait()
        path.unlink(missing_ok=True)
        listener.close()
        for task in (starting, watching):
            task.cancel()
        await asyncio.to_thread(self.children.end)
        for writer in list(self.leases):
            writer.close()

    async def _start_server(self) -> None:
        # An existing server of this state may hold history: only a database that is not there yet takes the template.
        fresh = not self.layout.database.exists()
        copied = use_template(self.layout.database)
        self.children.start(server_command(self.layout, self.port))
        deadline = time.monotonic() + self.start_timeout_s
        while not await asyncio.to_thread(is_healthy, self.port):
            code = self.children.exit_code("prefect-server")
            if code is not None or time.monotonic() > deadline:
                what = f"ended with code {code}" if code is not None else f"not ready after {self.start_timeout_s:g} s"
                self.failure = (
                    f"the Prefect server at {self.api_url} {what}; the end of its log "
                    f"{self.layout.log('prefect-server')}:\n{self.layout.tail('prefect-server')}"
                )
                break
            await asyncio.sleep(0.1)
        if fresh and not copied and not self.failure and self.layout.database.exists():
            try:
                await asyncio.to_thread(save_template, self.layout.database)
            except OSError as error:
                logger.warning("no template database was kept: %s", error)
        self.ready.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), 10)
            message = json.loads(line) if line else {"op": "none"}
            if message["op"] in ("lease", "stand"):
                await self._serve_lease(message, reader, writer)
            elif message["op"] == "status":
                await _answer(writer, self._status())
            elif message["op"] == "down":
                self.standing = False
                await _answer(writer, self._status())
                if message.get("now"):
                    self.ending.set()
        except (OSError, TimeoutError, ValueError) as error:
            logger.warning("a client left or spoke nonsense: %s", error)
        finally:
            self.leases.pop(writer, None)
            writer.close()

    async def _serve_lease(
        self, message: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.leases[writer] = int(message["pid"])
        gone = asyncio.ensure_future(reader.read())  # ends with the connection: a lease never speaks again
        ready = asyncio.ensure_future(self._provide(message))
        await asyncio.wait({gone, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            error = ready.result()
            if message["op"] == "stand" and not error:
                self.standing = True
            await _answer(writer, {**self._status(), "error": error})
            if message["op"] == "lease":
                await gone
        ready.cancel()
        gone.cancel()

    async def _provide(self, message: dict[str, Any]) -> str:
        """Start what a lease asks for and is not there yet; why that failed, or nothing."""
        await self.ready.wait()
        if self.failure:
            return self.failure
        for work_pool, limit in message.get("work_pools", {}).items():
            if f"worker-{work_pool}" not in self.children:
                try:
                    await asyncio.to_thread(create_work_pool, self.port, work_pool)
                except OSError as error:
                    return f"the Prefect server at {self.api_url} did not take the work pool {work_pool!r}: {error}"
                self.children.start(worker_command(self.layout, self.api_url, work_pool, int(limit)))
        if message.get("dask") is not None and "dask" not in self.children:
            return await self._start_dask(message["dask"])
        return ""

    async def _start_dask(self, arguments: list[str]) -> str:
        scheduler_file = self.layout.state_dir / "scheduler.json"
        scheduler_file.unlink(missing_ok=True)
        command = (sys.executable, "-m", "resources.pools.standing", *arguments)
        command += (
            "--scheduler-file",
            str(scheduler_file),
            "--owner-pid",
            str(os.getpid()),
            "--env",
            "PREFECT_API_URL",
        )
        self.children.start(ChildCommand("dask", command, {**os.environ, "PREFECT_API_URL": self.api_url}))
        deadline = time.monotonic() + self.start_timeout_s
        while not scheduler_file.exists():
            code = self.children.exit_code("dask")
            if code is not None or time.monotonic() > deadline:
                what = f"ended with code {code}" if code is not None else f"not ready after {self.start_timeout_s:g} s"
                self.children.forget("dask")
                return f"the Dask cluster {what}; the end of its log:\n{self.layout.tail('dask')}"
            await asyncio.sleep(0.1)
        self.dask_address = json.loads(scheduler_file.read_text())["address"]
        return ""

    async def _watch(self) -> None:
        started = time.monotonic()
        had_lease = False
        while True:
            await asyncio.sleep(TICK_S)
            for writer, pid in list(self.leases.items()):
                if is_gone(pid):  # a forked child of the driver may hold the connection open
                    del self.leases[writer]
                    writer.close()
            had_lease = had_lease or bool(self.leases) or self.standing
            waited_enough = had_lease or time.monotonic() - started > FIRST_LEASE_S
            if not self.leases and not self.standing and waited_enough:
                self.ending.set()
            self.children.reap_adopted()
            if self.ready.is_set():
                self.children.restart_ended()

    def _status(self) -> dict[str, Any]:
        return {
            "error": self.failure,
            "api_url": self.api_url,
            "dask_address": self.dask_address,
            "pid": os.getpid(),
            "standing": self.standing,
            "leases": sorted(self.leases.values()),
            "children": self.children.pids(),
            "state_dir": str(self.layout.state_dir),
        }


async def _answer(writer: asyncio.StreamWriter, content: Mapping[str, Any]) -> None:
    writer.write(json.dumps(content).encode() + b"\n")
    await writer.drain()


def _become_only_supervisor(layout: StackLayout) -> int | None:
    """The lock of the state folder, or None when a predecessor does not end in time."""
    lock = os.open(layout.supervisor_lock, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + PREDECESSOR_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m resources.pools.supervisor")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--start-timeout-s", type=float, default=60.0)
    options = parser.parse_args(arguments)
    if os.fork():  # the driver waits for this first process only: the supervisor is nobody's child
        os._exit(0)
    os.setsid()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    layout = StackLayout.prepare(options.state_dir)
    if _become_only_supervisor(layout) is None:
        logger.error("another supervisor of %s does not end", layout.state_dir)
        return 1
    adopt_orphans()
    port = options.port or free_port()
    if not is_free(port):
        logger.error("port %d of %s is in use", port, HOST)
        return 1
    asyncio.run(_run(layout, port, options.start_timeout_s))
    return 0


async def _run(layout: StackLayout, port: int, start_timeout_s: float) -> None:
    await Supervisor(layout, port, start_timeout_s).run()


if __name__ == "__main__":
    sys.exit(main())
