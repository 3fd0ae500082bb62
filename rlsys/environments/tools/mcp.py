"""Tools of an MCP server (https://modelcontextprotocol.io) for environments.

In: `rlsys.mcp_tools(command=[...])` or `(url=...)` among an environment's tools. Out: a `Tool` for
each tool of the server, with the server's schema. Each worker process starts the server once for
all of its episodes, and again if it dies or does not answer any more.

Needs the package `mcp`: the extra rlsys[mcp].
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rlsys.common.background_tasks import start_task
from rlsys.environments.tools.tools import (
    MAX_OUTPUT_CHARS,
    Execute,
    Tool,
    ToolError,
    ToolSource,
    as_text,
    error_text,
)
from rlsys.errors import InvalidValue, first_error, require

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as Listed

    # A client, and the event that is set when it has lost its server.
    Connection = tuple[Client, asyncio.Event]

TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0
# The client waits 2 s for the server to end, sends SIGTERM, waits 2 s more and kills it.
STOP_S = 15.0

# Number of consecutive cancelled calls without an answer after which the server counts as dead.
MAX_UNANSWERED = 8

# Maximum number of pages of a server's list of tools.
MAX_PAGES = 100


@dataclass(frozen=True, kw_only=True)
class McpTools(ToolSource):
    """Settings of a server, made by `mcp_tools` and sent to the workers."""

    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold keys
    cwd: str | None = None
    names: tuple[str, ...] | None = None
    prefix: str = ""
    timeout_s: float = TIMEOUT_S
    on_timeout: Literal["tell", "fail"] = "tell"
    start_timeout_s: float = START_TIMEOUT_S
    max_output_chars: int = MAX_OUTPUT_CHARS

    def __post_init__(self) -> None:
        require(
            bool(self.command) != bool(self.url),
            "mcp_tools: command",
            list(self.command),
            rule=f"exactly one of command and url={self.url!r} must be set",
            fix="Pass the command that starts the server, or its URL.",
        )
        require(
            self.start_timeout_s > 0,
            "mcp_tools: start_timeout_s",
            self.start_timeout_s,
            rule="must be positive",
            fix="Use a number of seconds above 0.",
        )

    @property
    def where(self) -> str:
        """The URL or the command of the server, for messages."""
        return self.url or " ".join(self.command)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Sequence[Tool]]:
        """Return the tools, while the server runs.

        Raises InvalidValue if the server does not start or lacks one of `names`.
        """
        require(
            importlib.util.find_spec("mcp") is not None,
            "mcp_tools",
            self.where,
            rule="needs the package mcp",
            fix='Install it with pip install "rlsys[mcp]".',
        )
        server = McpServer(self)
        try:
            try:
                listed = await server.list()
            except ConnectionError as error:
                raise InvalidValue(
                    "mcp_tools",
                    self.where,
                    rule=str(error),
                    fix="Run the server by hand, and see its standard error in the worker's log.",
                ) from error
            available = [one.name for one in listed]
            missing = sorted(set(self.names or ()) - set(available))
            require(
                not missing,
                "mcp_tools: names",
                missing,
                rule=f"the MCP server {self.where} has the tools {available}",
                fix="Use some of them.",
            )
            yield [
                McpTool(server, one)
                for one in listed
                if self.names is None or one.name in self.names
            ]
        finally:
            await server.stop()


def mcp_tools(
    *,
    command: Sequence[str] = (),
    url: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    names: Sequence[str] | None = None,
    prefix: str = "",
    timeout_s: float = TIMEOUT_S,
    on_timeout: Literal["tell", "fail"] = "tell",
    start_timeout_s: float = START_TIMEOUT_S,
    max_output_chars: int = MAX_OUTPUT_CHARS,
) -> McpTools:
    """Return the tools of an MCP server, for the `tools` of an environment.

    Errors that the server answers go to the model. If the server dies, the episodes with running
    calls fail, and the next call starts it again. Calls of tools that the server declares read-only
    or idempotent are repeated instead.

    Args:
        command: Program and arguments of a server that uses standard input and output. Each worker
            process starts it once.
        url: URL of a running server that uses HTTP.
        env: Environment variables of the server, added to PATH, HOME and the like.
        cwd: Working directory of the server.
        names: Names of the tools to use. None: all.
        prefix: Prefix of the names that the model sees.
        timeout_s: Time limit of a call in seconds, as in `rlsys.tool`.
        on_timeout: "tell" (the model) or "fail" (the episode), as in `rlsys.tool`.
        start_timeout_s: Time limit in seconds for the server to start and list its tools.
        max_output_chars: Maximum length of an output, as in `rlsys.tool`.

    Returns:
        A source of tools. The server starts when an environment's host opens it.

    Raises:
        InvalidValue: An argument is wrong.
    """
    if isinstance(command, str):
        raise InvalidValue(
            "mcp_tools: command",
            command,
            rule="must be a list, since no shell splits it",
            fix=f"Use {command.split()!r}.",
        )
    return McpTools(
        command=tuple(command),
        url=url,
        env=dict(env or {}),
        cwd=cwd,
        names=None if names is None else tuple(names),
        prefix=prefix,
        timeout_s=timeout_s,
        on_timeout=on_timeout,
        start_timeout_s=start_timeout_s,
        max_output_chars=max_output_chars,
    )


class McpTool(Tool):
    """A tool of a server, with the server's schema."""

    def __init__(self, server: McpServer, listed: Listed) -> None:
        spec = server.spec
        super().__init__(
            timeout_s=spec.timeout_s,
            on_timeout=spec.on_timeout,
            max_output_chars=spec.max_output_chars,
        )
        self.name = f"{spec.prefix}{listed.name}"
        self.schema = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": listed.description or "",
                "parameters": listed.input_schema,
            },
        }
        hints = listed.annotations
        self._is_repeatable = bool(hints and (hints.read_only_hint or hints.idempotent_hint))
        self._server = server
        self._name = listed.name

    async def output(self, arguments: Mapping[str, Any], execute: Execute) -> str:
        """Call the server and return the text of its result."""
        result = await self._server.call(self._name, arguments, self._is_repeatable)
        text = _text(result)
        if result.is_error:
            raise ToolError(error_text(text))
        return text


def _text(result: CallToolResult) -> str:
    """Return the text of a result. Images and sounds are replaced by their type."""
    if not result.content and result.structured_content is not None:
        return as_text("of an MCP server", result.structured_content)
    parts = []
    for block in result.content:
        match block.type:
            case "text":
                parts.append(block.text)
            case "resource":
                parts.append(str(getattr(block.resource, "text", f"[{block.resource.uri}]")))
            case "resource_link":
                parts.append(f"[{block.uri}]")
            case _:
                parts.append(f"[{block.type}, {block.mime_type}]")
    return "\n".join(parts)


class McpServer:
    """A server that starts with the first call, and again after it was lost.

    The connection belongs to its own task, since the task that opens it must close it. `_started`
    holds the connection of that task or its error.
    """

    def __init__(self, spec: McpTools) -> None:
        self.spec = spec
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[Connection] | None = None
        self._lost = asyncio.Event()
        self._num_unanswered = 0

    async def list(self) -> list[Listed]:
        """Return the tools of the server. Raises ConnectionError."""
        client, _ = await self._connection()
        found: list[Listed] = []
        cursor = None
        try:
            async with asyncio.timeout(self.spec.start_timeout_s):
                for _ in range(MAX_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    found += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
        except TimeoutError as error:
            raise ConnectionError(
                f"the MCP server {self.spec.where} did not list its tools within "
                f"start_timeout_s={self.spec.start_timeout_s:g}"
            ) from error
        return found

    async def call(
        self, name: str, arguments: Mapping[str, Any], is_repeatable: bool
    ) -> CallToolResult:
        """Call a tool.

        Raises ToolError if the server rejects the call and ConnectionError if it was lost.
        """
        from mcp import MCPError

        num_tries = 2 if is_repeatable else 1
        for attempt in range(num_tries):
            client, lost = await self._connection()
            try:
                result = await client.call_tool(name, dict(arguments))
            except asyncio.CancelledError:
                self._num_unanswered += 1
                if self._num_unanswered >= MAX_UNANSWERED:
                    lost.set()
                raise
            except MCPError as error:
                if not _is_lost(error):
                    self._num_unanswered = 0
                    raise ToolError(error_text(error.message)) from error
                lost.set()
                if attempt == num_tries - 1:
                    raise ConnectionError(
                        f"the MCP server {self.spec.where} was lost while its tool {name} ran: "
                        f"{error.message}"
                    ) from error
            else:
                self._num_unanswered = 0
                return result
        raise AssertionError("every try returns or raises")

    async def stop(self) -> None:
        """Close the connection. This ends a server that was started by its command."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=STOP_S)

    async def _connection(self) -> Connection:
        if self._task is None or self._started is None or self._lost.is_set():
            self._lost = asyncio.Event()
            self._num_unanswered = 0
            self._started = asyncio.get_running_loop().create_future()
            started = self._started
            self._task = start_task(
                self._keep(started, self._lost, self._task),
                fail=lambda error: self._not_started(started, repr(error)),
            )
        # A cancelled caller must not cancel the start for the others.
        return await asyncio.shield(self._started)

    async def _keep(
        self,
        started: asyncio.Future[Connection],
        lost: asyncio.Event,
        before: asyncio.Task[None] | None,
    ) -> None:
        """Hold a connection until it is lost, after the previous one has been closed."""
        from mcp import Client

        if before is not None:
            await asyncio.wait({before}, timeout=STOP_S)
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self.spec.start_timeout_s):
                    transport = _Watched(self._transport(), lost)
                    client = await stack.enter_async_context(Client(transport))
                started.set_result((client, lost))
                await lost.wait()
        except TimeoutError:
            self._not_started(started, "it did not answer in time (start_timeout_s=)")
        except asyncio.CancelledError:
            if not started.done():
                started.cancel()
            raise
        except Exception as error:  # noqa: BLE001, callers get it from the future
            self._not_started(started, str(first_error(error)) or repr(first_error(error)))
        finally:
            lost.set()

    def _not_started(self, started: asyncio.Future[Connection], reason: str) -> None:
        if not started.done():  # else it was lost later, and the next call starts it again
            started.set_exception(
                ConnectionError(f"the MCP server {self.spec.where} did not start: {reason}")
            )
            started.exception()  # asyncio must not log it if there is no caller

    def _transport(self) -> Any:
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self.spec.url:
            return streamable_http_client(self.spec.url)
        program, *arguments = self.spec.command
        return stdio_client(
            StdioServerParameters(
                command=program, args=arguments, env=dict(self.spec.env), cwd=self.spec.cwd
            )
        )


def _is_lost(error: Any) -> bool:
    """Return whether an error means that the connection or its session is lost."""
    from mcp.types import CONNECTION_CLOSED

    return error.code == CONNECTION_CLOSED or "session terminated" in error.message.lower()


class _Watched:
    """A transport that sets an event when its stream ends, for example because the server died."""

    def __init__(self, transport: Any, lost: asyncio.Event) -> None:
        self._transport = transport
        self._lost = lost

    async def __aenter__(self) -> tuple[Any, Any]:
        read, write = await self._transport.__aenter__()
        return _WatchedStream(read, self._lost), write

    async def __aexit__(self, *error: Any) -> bool | None:
        ended: bool | None = await self._transport.__aexit__(*error)
        return ended


class _WatchedStream:
    def __init__(self, stream: Any, lost: asyncio.Event) -> None:
        self._stream = stream
        self._lost = lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> _WatchedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        self._lost.set()
        ended: bool | None = await self._stream.__aexit__(*error)
        return ended

    def __aiter__(self) -> _WatchedStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._lost.set()
            raise
