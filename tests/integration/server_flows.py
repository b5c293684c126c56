"""Flows that the server tests call from Python and deploy."""

from __future__ import annotations

import os

from prefect.runtime import flow_run

from flows.server import server_flow


@server_flow(name="adds", log_prints=False)
def adds(left: int, right: int) -> dict[str, object]:
    return {"sum": left + right, "api_url": os.environ.get("PREFECT_API_URL"), "run": str(flow_run.get_id())}


@server_flow(name="adds-later")
async def adds_later(left: int, right: int) -> int:
    return left + right


@server_flow(name="outer")
def outer() -> dict[str, object]:
    return adds(1, 2)
