"""How does a cluster run in a process of its own? ``python -m resources.pools.standing`` until SIGTERM.

The same process serves a standing cluster and, as a child of the driver (``--owner-pid``), an embedded one: the
scheduler then never competes with the driver for its interpreter lock, and no script needs a ``__main__`` guard for
the worker processes to start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import dask.config
import yaml
from distributed import Scheduler, SpecCluster
from pydantic import ValidationError

from resources.hardware import PoolsConfig
from resources.pools.forking import common_environment, prepare_fork_server
from resources.pools.spec import dask_settings, worker_specs

MULTIPROCESSING = "distributed.worker.multiprocessing-method"
OWNER_CHECK_S = 0.25
"""How often an embedded cluster looks whether its driver still lives."""
CLOSE_S = 6.0
"""A cluster that has not closed in order after this time ends hard; nannies take their workers with them."""


async def serve(
    config: PoolsConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    scheduler_file: Path | None = None,
    preload_modules: tuple[str, ...] = (),
    shared_modules: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    owner_pid: int | None = None,
) -> None:
    """Start scheduler and workers, write their address, pid and names to ``scheduler_file``, serve until told to end.

    The end is SIGTERM, SIGINT, or the death of the process ``owner_pid``. Where workers can be forked from one process,
    that one imports ``preload_modules`` and ``shared_modules``; every worker imports ``preload_modules`` in any case.
    """
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    watch = loop.create_task(_end_with_owner(owner_pid, ending))
    workers = worker_specs(config.classes, env=env or {}, preload_modules=preload_modules, host=host)
    common = common_environment(config.classes, env or {})
    method = "spawn" if common is None else "forkserver"
    with dask.config.set({**dask_settings(config.no_workers_timeout_s), MULTIPROCESSING: method}):
        if common is not None:
            prepare_fork_server(common, (*preload_modules, *shared_modules))
        cluster: Any = SpecCluster(
            workers=workers,
            scheduler={"cls": Scheduler, "options": _scheduler_options(host, port)},
            asynchronous=True,
            name="pools",
        )
        starting = asyncio.ensure_future(_start(cluster))
        await _first_of(starting, ending)
        if starting.done():
            starting.result()
            address = cluster.scheduler_address
            print(f"Dask scheduler at {address}, workers {', '.join(workers)}", flush=True)
            if scheduler_file is not None:
                _write_whole(scheduler_file, {"address": address, "pid": os.getpid(), "workers": list(workers)})
            await ending.wait()
        _end_hard_after(CLOSE_S)
        watch.cancel()
        starting.cancel()
        await cluster.close()


def _scheduler_options(host: str, port: int) -> dict[str, Any]:
    # Without an address of its own the dashboard takes port 8787, and a second cluster warns about it.
    return {"host": host, "port": port, "dashboard_address": f"{host}:0"}


async def _start(cluster: Awaitable[object]) -> None:
    await cluster


async def _first_of(starting: asyncio.Future[None], ending: asyncio.Event) -> None:
    told = asyncio.ensure_future(ending.wait())
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()


async def _end_with_owner(owner_pid: int | None, ending: asyncio.Event) -> None:
    while owner_pid is not None and os.getppid() == owner_pid:
        await asyncio.sleep(OWNER_CHECK_S)
    if owner_pid is not None:
        ending.set()


def _end_hard_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, args=(1,))
    timer.daemon = True
    timer.start()


def _write_whole(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def parse_classes(text: str) -> dict[str, int]:
    """``compute=1,cpu=2`` as numbers of workers by class.

    Raises:
        ValueError: names the part that is not of the form ``class=number``.
    """
    counts = {}
    for part in text.split(","):
        name, separator, number = part.partition("=")
        if not separator or not name.strip() or not number.strip().isdigit():
            raise ValueError(f"--classes has {part!r}; write class=number, e.g. compute=1,bandwidth=1,cpu=2")
        counts[name.strip()] = int(number)
    return counts


def pools_config(config_path: Path | None, classes: str | None) -> PoolsConfig:
    """The ``pools`` section of a run file, with the numbers of workers that ``--classes`` gives instead of its own.

    Raises:
        ValueError: the file cannot be read, the section is wrong, or ``--classes`` names a class that it lacks.
    """
    section: dict[str, Any] = {}
    if config_path is not None:
        try:
            section = (yaml.safe_load(config_path.read_text()) or {}).get("pools") or {}
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"--config {config_path} cannot be read: {error}") from error
    config = PoolsConfig.model_validate({**section, "address": None})
    counts = parse_classes(classes) if classes else {}
    unknown = sorted(set(counts) - set(config.classes))
    if unknown:
        raise ValueError(f"--classes names {unknown}; known classes: {sorted(config.classes)}")
    return config.model_copy(
        update={
            "classes": {
                name: each.model_copy(update={"num_workers": counts.get(name, each.num_workers)})
                for name, each in config.classes.items()
            }
        }
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m resources.pools.standing", description=__doc__)
    parser.add_argument("--config", type=Path, help="run file whose `pools` section names the classes")
    parser.add_argument("--classes", help="numbers of workers by class: compute=1,cpu=2")
    parser.add_argument("--pools-json", help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="port of the scheduler; 0 takes a free one")
    parser.add_argument("--scheduler-file", type=Path, help="where to write the address once every worker is there")
    parser.add_argument("--preload", action="append", default=[], help="module that every worker imports first")
    parser.add_argument(
        "--share", action="append", default=[], help="module to import once, where workers are forked from one process"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="variable for every worker; without a value, this process's own",
    )
    parser.add_argument("--owner-pid", type=int, help="end when this parent process is gone")
    options = parser.parse_args(arguments)
    try:
        if options.pools_json:
            config = PoolsConfig.model_validate_json(options.pools_json)
        else:
            config = pools_config(options.config, options.classes)
    except (ValueError, ValidationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(
            serve(
                config,
                host=options.host,
                port=options.port,
                scheduler_file=options.scheduler_file,
                preload_modules=tuple(options.preload),
                shared_modules=tuple(options.share),
                env=dict(_environment_entry(entry) for entry in options.env),
                owner_pid=options.owner_pid,
            )
        )
    except (OSError, RuntimeError) as error:
        print(f"error: the cluster cannot start: {_root_cause(error)}", file=sys.stderr, flush=True)
        return 1
    return 0


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _environment_entry(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    return name, value if separator else os.environ.get(name, "")


if __name__ == "__main__":
    sys.exit(main())
