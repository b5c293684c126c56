"""Serve any `ToolEnvironment` over HTTP, as `tool_server` speaks it: ``python -m resources.environments.tools.service
package.module:Class --port 8100``. A session is one episode."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from resources.environments.instances import instantiate_named
from resources.environments.tools.tool_environment import ToolEnvironment, ToolError, ToolResult


class ToolService:
    """Sessions of one environment, ``max_sessions`` at most. One without a request for ``idle_s`` seconds is closed
    when its room is wanted."""

    def __init__(
        self,
        make: Callable[[], ToolEnvironment],
        *,
        max_sessions: int = 256,
        idle_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._max_sessions, self._idle_s, self._clock = make, max_sessions, idle_s, clock
        self._sessions: dict[str, ToolEnvironment] = {}
        self._last_used: dict[str, float] = {}

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/sessions", self._open, methods=["POST"]),
                Route("/sessions/{session}/calls", self._call, methods=["POST"]),
                Route("/sessions/{session}/answer", self._answer, methods=["POST"]),
                Route("/sessions/{session}/judgement", self._judgement, methods=["GET"]),
                Route("/sessions/{session}", self._close, methods=["DELETE"]),
            ]
        )

    async def _open(self, request: Request) -> JSONResponse:
        wanted = await request.json()
        await self._forget_idle()
        if len(self._sessions) >= self._max_sessions:
            return JSONResponse({"error": f"all {self._max_sessions} sessions are taken"}, status_code=503)
        environment, session = self._make(), secrets.token_hex(8)
        self._sessions[session], self._last_used[session] = environment, self._clock()
        messages = await _awaited(environment.start(int(wanted["seed"])))
        tools = [tool.declaration() for tool in environment.tools]
        opening = {"session": session, "messages": messages, "tools": tools, "version": environment.env_version}
        return JSONResponse(opening)

    async def _call(self, request: Request) -> JSONResponse:
        environment = self._session(request)
        if environment is None:
            return _unknown()
        call = await request.json()
        try:
            result = await _awaited(environment.call_tool(call["name"], call["arguments"]))
        except ToolError as error:
            return JSONResponse({"error": str(error)}, status_code=422)
        result = result if isinstance(result, ToolResult) else ToolResult(str(result))
        return JSONResponse(
            {
                "content": result.content,
                "reward": result.reward,
                "terminated": result.terminated,
                "success": result.success,
                "components": dict(result.components),
            }
        )

    async def _answer(self, request: Request) -> JSONResponse:
        environment = self._session(request)
        if environment is None:
            return _unknown()
        outcome = await _awaited(environment.answer((await request.json())["content"]))
        return JSONResponse(
            {
                "messages": outcome.observation,
                "reward": outcome.reward,
                "terminated": outcome.terminated,
                "truncated": outcome.truncated,
                "success": outcome.success,
                "invalid_action": outcome.invalid_action,
                "components": outcome.components,
            }
        )

    async def _judgement(self, request: Request) -> JSONResponse:
        environment = self._session(request)
        if environment is None:
            return _unknown()
        judgement = getattr(environment, "judgement", None)
        return JSONResponse({"judgement": None if judgement is None else await _awaited(judgement())})

    async def _close(self, request: Request) -> JSONResponse:
        await self._end(request.path_params["session"])
        return JSONResponse({})

    def _session(self, request: Request) -> ToolEnvironment | None:
        session = request.path_params["session"]
        if session in self._sessions:
            self._last_used[session] = self._clock()
        return self._sessions.get(session)

    async def _forget_idle(self) -> None:
        if len(self._sessions) >= self._max_sessions:
            limit = self._clock() - self._idle_s
            for session in [each for each, used in self._last_used.items() if used <= limit]:
                await self._end(session)

    async def _end(self, session: str) -> None:
        self._last_used.pop(session, None)
        environment = self._sessions.pop(session, None)
        if environment is not None:
            await environment.close()


def _unknown() -> JSONResponse:
    return JSONResponse({"error": "no such session"}, status_code=404)


async def _awaited(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


def maker(name: str, arguments: Mapping[str, Any]) -> Callable[[], ToolEnvironment]:
    """Makes environments of a name. Raises ValueError for one that has no tools."""

    def make() -> ToolEnvironment:
        environment = instantiate_named(name, arguments)
        if not isinstance(environment, ToolEnvironment):
            raise ValueError(f"{name!r} is no ToolEnvironment; only those have tools to serve")
        return environment

    make()
    return make


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description="Serve the tools of an environment over HTTP")
    parser.add_argument("environment", help="package.module:Class, a ToolEnvironment")
    parser.add_argument("--arguments", default="{}", help="its keyword arguments, as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=8100, help="0: one that is free, printed")
    parser.add_argument("--max-sessions", type=int, default=256, help="episodes at once")
    options = parser.parse_args()
    service = ToolService(maker(options.environment, json.loads(options.arguments)), max_sessions=options.max_sessions)
    uvicorn.run(service.application(), host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
