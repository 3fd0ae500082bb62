"""The tools of an MCP server (https://modelcontextprotocol.io), as tools of an environment.

In: `rlsys.mcp_tools(command=[...])` or `(url=...)` beside other tools. Out: a `Tool` for each that
the server lists, with the server's own schema. Each worker process starts the server once, for all
of its episodes, and starts it again where it died or answers nothing any more.

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
)
from rlsys.errors import first_error

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as Listed

    # A client, and the event that says that it has lost its server.
    Connection = tuple[Client, asyncio.Event]

TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0
# The client gives the server 2 s to end by itself, 2 s after SIGTERM, and kills it then.
STOP_S = 15.0

# So many calls given up in a row, none answered between them, and the server counts as dead.
MAX_UNANSWERED = 8

# A server that lists for ever must not hold up the start.
MAX_PAGES = 100


@dataclass(frozen=True, kw_only=True)
class McpTools(ToolSource):
    """Where a server is, and what of it is used; made by `mcp_tools`, travels to the workers."""

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
        if bool(self.command) == bool(self.url):
            raise ValueError(
                f"mcp_tools(command={list(self.command)!r}, url={self.url!r}): a server is started "
                "by its command or reached by its URL; give one of them."
            )
        if not self.start_timeout_s > 0:
            raise ValueError(
                f"start_timeout_s={self.start_timeout_s} lets no server start; use a positive "
                "number of seconds."
            )

    @property
    def where(self) -> str:
        return self.url or " ".join(self.command)

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Sequence[Tool]]:
        """The tools, while the server runs. Raises ValueError where it does not start, or lacks
        one of the names.
        """
        if importlib.util.find_spec("mcp") is None:
            raise ValueError(
                f"the tools of {self.where} need the package mcp; install it with "
                'pip install "rlsys[mcp]".'
            )
        server = McpServer(self)
        try:
            try:
                listed = await server.list()
            except ConnectionError as error:
                raise ValueError(str(error)) from error
            missing = set(self.names or ()) - {one.name for one in listed}
            if missing:
                raise ValueError(
                    f"the MCP server {self.where} has no tools {', '.join(sorted(missing))}; it "
                    f"has {', '.join(one.name for one in listed) or 'none'}."
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
    """The tools of an MCP server, to stand among an environment's `tools`.

    command: the program and its arguments; it is started once in each worker process, speaks MCP
        over its standard input and output, and sees PATH, HOME and the like, and `env`.
    url: of a server that runs already and speaks MCP over HTTP.
    names: only these of its tools; None: all.
    prefix: stands before each name that the model sees, where two servers share names.
    timeout_s, on_timeout, max_output_chars: of one call, as those of `rlsys.tool`.
    start_timeout_s: within which the server has started and listed its tools.

    What the server answers as an error the model is told. A server that dies ends the episodes
    whose calls were under way, as a failure of ours, and the next call starts it again; a call of a
    tool that the server declares read-only or idempotent is made again instead.
    """
    if isinstance(command, str):
        raise ValueError(
            f"command={command!r} is a text, but no shell splits it; give a list, such as "
            f"{command.split()!r}."
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
    """One tool of a server; its schema is passed through."""

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
        result = await self._server.call(self._name, arguments, self._is_repeatable)
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text


def _text(result: CallToolResult) -> str:
    """What a model can read of it; images and sounds are named."""
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
    """A server that is started when it is first needed, and again when it has gone.

    A task of its own keeps the connection, for what opens it must be what closes it. `_started` is
    the connection of that task, or why there is none.
    """

    def __init__(self, spec: McpTools) -> None:
        self.spec = spec
        self._keeper: asyncio.Task[None] | None = None
        self._started: asyncio.Future[Connection] | None = None
        self._gone = asyncio.Event()
        self._num_unanswered = 0

    async def list(self) -> list[Listed]:
        """Raises ConnectionError."""
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
                f"start_timeout_s={self.spec.start_timeout_s:g}."
            ) from error
        return found

    async def call(
        self, name: str, arguments: Mapping[str, Any], is_repeatable: bool
    ) -> CallToolResult:
        """Raises ToolError for what the server says against the call, ConnectionError where it
        died over it.
        """
        from mcp import MCPError

        num_tries = 2 if is_repeatable else 1
        for attempt in range(num_tries):
            client, gone = await self._connection()
            try:
                result = await client.call_tool(name, dict(arguments))
            except asyncio.CancelledError:
                self._num_unanswered += 1
                if self._num_unanswered >= MAX_UNANSWERED:
                    gone.set()
                raise
            except MCPError as error:
                if not _is_lost(error):
                    self._num_unanswered = 0
                    raise ToolError(error.message) from error
                gone.set()
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
        """End the connection, and the server with it where we started that."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=STOP_S)

    async def _connection(self) -> Connection:
        if self._keeper is None or self._started is None or self._gone.is_set():
            self._gone = asyncio.Event()
            self._num_unanswered = 0
            self._started = asyncio.get_running_loop().create_future()
            # The one before ends by itself, while this starts.
            started = self._started
            self._keeper = start_task(
                self._keep(started, self._gone, self._keeper),
                fail=lambda error: self._not_started(started, repr(error)),
            )
        # One caller that gives up must not end the start for the others.
        return await asyncio.shield(self._started)

    async def _keep(
        self,
        started: asyncio.Future[Connection],
        gone: asyncio.Event,
        before: asyncio.Task[None] | None,
    ) -> None:
        from mcp import Client

        if before is not None:
            await asyncio.wait({before}, timeout=STOP_S)
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self.spec.start_timeout_s):
                    transport = _Watched(self._transport(), gone)
                    client = await stack.enter_async_context(Client(transport))
                started.set_result((client, gone))
                await gone.wait()
        except TimeoutError:
            self._not_started(started, "it did not answer in time (start_timeout_s=)")
        except asyncio.CancelledError:
            if not started.done():
                started.cancel()
            raise
        except Exception as error:  # noqa: BLE001, it is raised where it is waited for
            self._not_started(started, str(first_error(error)) or repr(first_error(error)))
        finally:
            gone.set()

    def _not_started(self, started: asyncio.Future[Connection], why: str) -> None:
        if not started.done():  # else it went, and the next call starts it again
            started.set_exception(
                ConnectionError(
                    f"the MCP server {self.spec.where} did not start: {why}. Run it by hand; what "
                    "it wrote to its standard error is in the worker's log."
                )
            )
            started.exception()  # those who wait are told; that nobody does is no mistake

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
    """Whether it says that the connection, or the session on it, is no more."""
    from mcp.types import CONNECTION_CLOSED

    return error.code == CONNECTION_CLOSED or "session terminated" in error.message.lower()


class _Watched:
    """A transport that tells when nothing more can be read from it, as when the server has died."""

    def __init__(self, transport: Any, gone: asyncio.Event) -> None:
        self._transport = transport
        self._gone = gone

    async def __aenter__(self) -> tuple[Any, Any]:
        read, write = await self._transport.__aenter__()
        return _WatchedStream(read, self._gone), write

    async def __aexit__(self, *error: Any) -> bool | None:
        ended: bool | None = await self._transport.__aexit__(*error)
        return ended


class _WatchedStream:
    def __init__(self, stream: Any, gone: asyncio.Event) -> None:
        self._stream = stream
        self._gone = gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> _WatchedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        self._gone.set()
        ended: bool | None = await self._stream.__aexit__(*error)
        return ended

    def __aiter__(self) -> _WatchedStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._gone.set()
            raise
