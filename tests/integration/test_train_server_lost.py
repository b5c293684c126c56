"""A Prefect server that goes away under a run: the run ends with a message that names it and the remedy, and stays
resumable."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.server_watch import LOST_AFTER_S
from resources.pools.prefect_processes import free_port, is_healthy, server_command, use_template
from resources.pools.stack_layout import StackLayout
from tests.integration.stack_processes import driver_environment, train_process
from tests.integration.stack_runs import recorded_iterations, small_fields, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 300.0
END_S = LOST_AFTER_S + 120.0
"""Prefect tries each of the last calls of a run again (the states of two iterations, and of the run), a minute each:
until the server is given up. A call that is between two attempts then makes one more."""


@contextmanager
def server(state: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A Prefect server that nobody looks after, and its address."""
    layout, port = StackLayout.prepare(state), free_port()
    use_template(layout.database)
    command = server_command(layout, port)
    process = subprocess.Popen(
        command.arguments, env=dict(command.env), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        wait_for("a Prefect server", lambda: is_healthy(port), WAIT_S)
        yield process, f"http://127.0.0.1:{port}/api"
    finally:
        process.kill()
        process.wait(10)


def test_a_lost_server_is_named_with_the_remedy(tmp_path: Path) -> None:
    fields = small_fields(
        tmp_path / "store", "serverless", num_iterations=10_000, evaluation={"before": False, "after": False}
    )
    families = fields["families"]
    fields["families"] = {name: families[name] for name in ("frozen_lake", "guess_number")}  # no reward pool
    with server(tmp_path / "server") as (process, url):
        env = driver_environment(tmp_path / "state", PREFECT_API_URL=url)
        with train_process(fields, tmp_path / "files", env) as driver:
            wait_for(
                "an iteration",
                lambda: driver.assert_runs() and recorded_iterations(tmp_path / "store"),
                WAIT_S,
            )
            process.kill()
            assert driver.wait(END_S) == 1, driver.output
            said = driver.output
    assert f"error: the Prefect server at {url} was lost under the run" in said
    assert "resume the run with --resume" in said
    done = recorded_iterations(tmp_path / "store")
    assert done == list(range(len(done)))
