"""A little MCP server for test_mcp.py: `python mcp_server.py [PORT]`, over stdio or HTTP."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent, ToolAnnotations

server = MCPServer("little")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Adds."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Fails."""
    raise ToolError("no such file")


@server.tool()
def pid() -> str:
    """The process."""
    return str(os.getpid())


@server.tool()
def variable(name: str) -> str:
    """Return a variable of the environment."""
    return os.environ.get(name, "none")


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def die() -> str:
    """Dies in the middle of a call."""
    os._exit(3)


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def die_once(mark: str) -> str:
    """Dies in the middle of its first call."""
    if not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(3)
    return "alive"


@server.tool(structured_output=False)
def picture() -> list[TextContent | ImageContent]:
    """An image with its title."""
    return [
        TextContent(type="text", text="A picture:"),
        ImageContent(type="image", data="", mime_type="image/png"),
    ]


if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
