"""What do ``up``, ``down`` and ``status`` of the standing local stack do and say?"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from resources.failures import RollartError
from resources.pools.local_stack import LocalStack, read_status, stand, take_down
from resources.pools.standing import pools_config
from resources.state_dir import state_dir

DEFAULT_PORT = 4200


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; 0 when it succeeded, 1 when the stack could not do it, 2 for wrong arguments."""
    options = _parse(arguments)
    try:
        if options.verb == "up":
            return _up(options)
        if options.verb == "down":
            return _down(options)
        return _status(options.state_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RollartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def default_work_pools() -> dict[str, int]:
    """Process work pools of a machine: trainings, and the reward replicas that they scale."""
    return {os.environ.get("TRAIN_POOL", "training"): 2, os.environ.get("REWARD_POOL", "rewards"): 4}


def parse_work_pool(text: str) -> tuple[str, int]:
    """``rewards=4`` as a name and a limit of runs at once."""
    name, separator, limit = text.partition("=")
    if not separator or not name or not limit.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=limit, e.g. rewards=4")
    return name, int(limit)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m resources.pools.local_stack", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start a Prefect server, work-pool workers and a Dask cluster that stand")
    up.add_argument("--port", type=int, default=DEFAULT_PORT, help="port of the Prefect server")
    up.add_argument("--work-pool", type=parse_work_pool, action="append", metavar="NAME=LIMIT")
    up.add_argument("--config", type=Path, help="run file whose `pools` section names the Dask workers")
    up.add_argument("--classes", help="numbers of Dask workers by class: compute=1,cpu=2")
    up.add_argument("--dask-port", type=int, default=0, help="port of the Dask scheduler; 0 takes a free one")
    up.add_argument("--preload", action="append", default=[], help="module that every Dask worker imports first")
    up.add_argument("--share", action="append", default=[], help="module to import once, where workers are forked")
    up.add_argument("--no-dask", action="store_true", help="start no Dask cluster")
    down = verbs.add_parser("down", help="end it and check that nothing of it is left")
    down.add_argument("--now", action="store_true", help="also when runs still use it")
    status = verbs.add_parser("status", help="say what runs")
    for verb in (up, down, status):
        verb.add_argument("--state-dir", default=str(state_dir()))
    return parser.parse_args(arguments)


def _up(options: argparse.Namespace) -> int:
    stack = stand(
        options.state_dir,
        port=options.port,
        work_pools=dict(options.work_pool or default_work_pools().items()),
        dask_arguments=None if options.no_dask else _dask_arguments(options),
    )
    _print_addresses(stack)
    return 0


def _dask_arguments(options: argparse.Namespace) -> list[str]:
    config = pools_config(options.config, options.classes)  # wrong classes are refused before anything starts
    arguments = ["--pools-json", config.model_dump_json(), "--port", str(options.dask_port)]
    arguments += [argument for module in ("prefect", *options.preload) for argument in ("--preload", module)]
    return arguments + [argument for module in options.share for argument in ("--share", module)]


def _print_addresses(stack: LocalStack) -> None:
    print(f"Prefect UI   {stack.ui_url}")
    print(f"Prefect API  {stack.api_url}   (export PREFECT_API_URL={stack.api_url})")
    if stack.dask_address:
        print(f"Dask         {stack.dask_address}   (--set pools.address={stack.dask_address})")
    print(f"logs         {stack.state_dir / 'logs'}")


def _down(options: argparse.Namespace) -> int:
    users = take_down(options.state_dir, now=options.now)
    if users:
        print(f"processes {users} still use the stack: it ends with the last of them (down --now ends it at once)")
    else:
        print("nothing of the stack is left")
    return 0


def _status(state_dir: str) -> int:
    status: dict[str, Any] | None = read_status(state_dir)
    if status is None:
        print(f"no stack runs for {Path(state_dir).resolve()}")
        return 0
    print(f"Prefect API  {status['api_url']}")
    if status["dask_address"]:
        print(f"Dask         {status['dask_address']}")
    print(f"standing     {'yes' if status['standing'] else 'no'}; used by processes {status['leases'] or 'none'}")
    for name, pid in status["children"].items():
        print(f"  {name} (process {pid})")
    return 0
