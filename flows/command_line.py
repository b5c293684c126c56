"""``python -m flows.train RUN_FILE --set a.b=c``: train from a run file."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from types import FrameType


def main(arguments: list[str] | None = None) -> int:
    """Run `train` from the command line. Returns the exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m flows.train", description="Train from a run file.")
    parser.add_argument("run_file", nargs="?", help="YAML file with RunConfig's fields; without it: all defaults")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace one field (dotted key)"
    )
    parser.add_argument("--resume", metavar="RUN_ID", help="go on with a run of the same store ('latest': the newest)")
    parser.add_argument("--verbose", action="store_true", help="show every log line of Prefect and of the workers")
    options = parser.parse_args(arguments)
    overrides = {}
    for item in options.set:
        key, separator, value = item.partition("=")
        if not separator or not key:
            parser.error(f"--set {item!r}: write it as KEY=VALUE, for example --set rollout.max_staleness=2")
        overrides[key] = value

    signal.signal(signal.SIGTERM, _interrupt)
    if not options.verbose:
        _quiet_the_console()

    from pydantic import ValidationError

    from flows.config import RunConfig, load_run_file, with_overrides
    from flows.train import check_arguments, train
    from resources.failures import RollartError

    try:
        config = with_overrides(load_run_file(options.run_file) if options.run_file else RunConfig(), overrides)
        check_arguments(config, None, options.resume)
    except ValidationError as error:
        for item in error.errors():
            print(
                f"error: {'.'.join(str(part) for part in item['loc']) or 'configuration'}: {item['msg']}",
                file=sys.stderr,
            )
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        train(config, resume=options.resume)
    except KeyboardInterrupt:
        print("interrupted; resume with --resume latest", file=sys.stderr)
        return 130
    except RollartError as error:  # any other error is a fault of ours: its traceback is the message
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _quiet_the_console() -> None:
    """Warnings only: the progress table is what a person reads, and the full log is in the Prefect UI."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")  # of the processes that this one starts
    from prefect.logging.handlers import PrefectConsoleHandler

    # Prefect has set its handlers up already: it was imported with the flow.
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if isinstance(handler, PrefectConsoleHandler):
            handler.setLevel(logging.WARNING)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # SIGTERM takes the same path as Ctrl-C, so that everything that was started is ended.
    raise KeyboardInterrupt
