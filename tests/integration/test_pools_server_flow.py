"""Flows that find or start their server: called from Python, inside another run, and as a deployment."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from prefect.deployments import run_deployment
from prefect.flows import EntrypointType
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.server import ServerFlow, prefect_server
from resources.failures import InfrastructureFailure
from tests.integration.server_flows import adds, adds_later, outer


# Prefect leaves a connection of the async flow open when its event loop ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_flow_runs_from_python_inside_a_run_and_as_a_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLART_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("REWARD_POOL", "served")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with prefect_server() as server:
        assert server.is_local
        assert os.environ["PREFECT_API_URL"] == server.api_url
        assert adds(1, 2)["sum"] == 3
        assert outer()["api_url"] == server.api_url
        assert asyncio.run(adds_later(2, 3)) == 5
        renamed = adds.with_options(name="renamed")
        assert isinstance(renamed, ServerFlow)
        assert renamed(2, 2)["sum"] == 4
        deployment = adds.to_deployment(
            name="test", work_pool_name="served", entrypoint_type=EntrypointType.MODULE_PATH
        )
        deployment.apply(work_pool_name="served")  # type: ignore[union-attr]
        run = run_deployment("adds/test", parameters={"left": 3, "right": 4}, timeout=60, poll_interval=0.2)
        assert run.state is not None and run.state.is_completed(), run.state  # type: ignore[union-attr]
    assert "PREFECT_API_URL" not in os.environ


def test_a_configured_server_that_is_not_there_is_named_before_anything_starts() -> None:
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(
            InfrastructureFailure,
            match=r"no Prefect server answers at http://127\.0\.0\.1:9/api.*prefect config unset PREFECT_API_URL",
        ),
    ):
        adds(1, 2)
