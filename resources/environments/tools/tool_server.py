"""An environment whose tools live behind HTTP: the episode is a session of a server, one of several.

The protocol (`resources.environments.tools.service` serves it for any `ToolEnvironment`):

| request                                                  | answer                                                    |
|----------------------------------------------------------|-----------------------------------------------------------|
| ``POST /sessions {"seed"}``                              | ``session``, ``messages``, ``tools``, ``version``         |
| ``POST /sessions/<s>/calls {"name", "arguments"}``       | the fields of a ToolResult                                |
| ``POST /sessions/<s>/answer {"content"}``                | a StepOutcome, with its observation as ``messages``       |
| ``GET /sessions/<s>/judgement``                          | ``judgement``                                             |
| ``DELETE /sessions/<s>``                                 | anything                                                  |

422 with ``error`` is a refusal of a call that the policy reads. A server that is not there, or full (503), is passed
over for the next address; what is lost in the middle of an episode is a failure of the environment, and its retry
begins anew elsewhere.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from resources.environments.base import Message, StepOutcome
from resources.environments.tools.addresses import check_addresses, in_turn
from resources.environments.tools.tool_calls import Tool
from resources.environments.tools.tool_environment import ToolEnvironment, ToolError, ToolResult
from resources.failures import EnvironmentFailure


class ToolServerEnvironment(ToolEnvironment):
    """Arguments of calls are checked against the server's schemas here, so a malformed call costs no request."""

    def __init__(
        self,
        addresses: Sequence[str],
        max_turns: int = 8,
        options: Mapping[str, Any] | None = None,
        declares_tools: bool = True,
        connect_deadline_s: float = 5.0,
        request_deadline_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """
        Args:
            addresses: ``http://host:port``; episodes go round.
            options: sent along when a session is opened.
            declares_tools: see `ToolEnvironment`.
            connect_deadline_s: for one address, in seconds.
            request_deadline_s: for one request, in seconds. The family's own deadlines hold as well.
            headers: of every request (an authorization, say).
            transport: of httpx, for tests.

        Raises ValueError for what is no address.
        """
        self._addresses = check_addresses(addresses, ("http", "https"))
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; it must be at least 1")
        self.max_turns, self.declares_tools = max_turns, declares_tools
        self._options = dict(options or {})
        self._timeout = httpx.Timeout(request_deadline_s, connect=connect_deadline_s)
        self._headers, self._transport = dict(headers or {}), transport
        self._client: httpx.AsyncClient | None = None
        self._session = ""

    async def start(self, seed: int) -> list[Message]:
        troubles = []
        for address in in_turn(self._addresses):
            self._client = httpx.AsyncClient(
                base_url=address,
                timeout=self._timeout,
                headers=self._headers,
                transport=self._transport,
                verify=_tls(),
            )
            try:
                opening = await self._request("POST", "/sessions", {"seed": seed, **self._options})
            except EnvironmentFailure as failure:
                troubles.append(str(failure))
                await self._client.aclose()
                continue
            try:
                self._session = str(opening["session"])
                self.tools = [_tool(declaration) for declaration in opening["tools"]]
                return [Message(role=each["role"], content=each["content"]) for each in opening["messages"]]
            except (KeyError, TypeError, ValueError) as error:
                raise EnvironmentFailure(f"the tool server {address} opened no usable session ({error!r})") from error
        raise EnvironmentFailure(f"no tool server took the episode: {'; '.join(troubles)}")

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        call = {"name": name, "arguments": dict(arguments)}
        answer = await self._request("POST", f"/sessions/{self._session}/calls", call)
        return ToolResult(
            content=str(answer["content"]),
            reward=answer.get("reward", 0.0),
            terminated=answer.get("terminated", False),
            success=answer.get("success"),
            components=answer.get("components", {}),
        )

    async def answer(self, content: str) -> StepOutcome:
        answer = await self._request("POST", f"/sessions/{self._session}/answer", {"content": content})
        return StepOutcome(
            answer.get("messages", []),
            reward=answer.get("reward", 0.0),
            terminated=answer.get("terminated", True),
            truncated=answer.get("truncated", False),
            success=answer.get("success"),
            invalid_action=answer.get("invalid_action", False),
            components=answer.get("components", {}),
        )

    async def judgement(self) -> dict[str, Any] | None:
        return (await self._request("GET", f"/sessions/{self._session}/judgement")).get("judgement")

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if self._session:
                await client.delete(f"/sessions/{self._session}")
        except httpx.HTTPError:
            pass  # the server is gone, and the session with it
        finally:
            await client.aclose()

    async def _request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        assert self._client is not None, "reset comes first"
        where = f"{method} {str(self._client.base_url).rstrip('/')}{path}"
        try:
            response = await self._client.request(method, path, json=body)
            value = response.json()
        except httpx.TimeoutException as error:
            raise EnvironmentFailure(f"{where} had no answer in time ({type(error).__name__})") from error
        except (httpx.HTTPError, ValueError) as error:
            raise EnvironmentFailure(f"{where} failed ({type(error).__name__}: {error})") from error
        is_refusal = response.status_code == httpx.codes.UNPROCESSABLE_ENTITY and path.endswith("/calls")
        if is_refusal and isinstance(value, dict) and "error" in value:
            raise ToolError(str(value["error"]))
        if response.is_error or not isinstance(value, dict):
            raise EnvironmentFailure(f"{where} answered {response.status_code}: {response.text[:200]}")
        return value


def _tool(declaration: Mapping[str, Any]) -> Tool:
    function = declaration["function"]
    return Tool(function["name"], function.get("description", ""), function.get("parameters") or {"type": "object"})


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all clients of the process: each takes 20 ms to make."""
    return ssl.create_default_context()
