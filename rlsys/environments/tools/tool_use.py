"""Tools of an environment: parsing of calls in replies, and answers to calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlsys.environments.environment import Environment
from rlsys.environments.tools.tool_formats import chosen_format
from rlsys.environments.tools.tools import Execute, ToolSet


class ToolUse:
    """Tools of one environment and the format of their calls.

    Args:
        template: Text of the chat template, which determines the format of calls. None: there is
            no template.
        execute: Executor of synchronous tools.
        is_shown: Whether the template renders the tools. If not, the environment describes them in
            a message.

    Raises:
        InvalidValue: There are tools, but no format of calls.
    """

    def __init__(
        self,
        environment: Environment,
        template: str | None,
        execute: Execute,
        *,
        is_shown: bool = True,
    ) -> None:
        self._is_shown = is_shown and template is not None
        self._tools = ToolSet(environment.tools, execute=execute)
        self._schemas: Sequence[Mapping[str, Any]] = []
        self._format = chosen_format(environment.tool_format, template) if self._tools else None
        self._render()

    async def open(self) -> None:
        """Start the tool servers. Raises InvalidValue if one does not start."""
        await self._tools.open()
        self._render()

    async def close(self) -> None:
        """Stop the tool servers."""
        await self._tools.close()

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Schemas for the chat template; the same object at each access."""
        return self._schemas if self._is_shown else ()

    def split_calls(self, message: dict[str, Any], *, num_before: int = 0) -> None:
        """Move the calls of a sampled message from its content to `tool_calls`.

        `num_before` is the number of earlier calls of the episode, from which ids are made.
        """
        if self._format is None:
            return
        reply = self._format.parse(message["content"], self._schemas, num_before=num_before)
        if reply.calls:
            message["content"] = reply.content
            message["tool_calls"] = reply.tool_calls

    async def call_all(
        self,
        calls: Sequence[Mapping[str, Any]],
        *,
        check_error: Callable[[str], None] = lambda text: None,
    ) -> list[dict[str, Any]]:
        """Run calls concurrently and return a tool message for each. See `ToolSet.call_all`."""
        return await self._tools.call_all(calls, check_error=check_error)

    def _render(self) -> None:
        self._schemas = self._tools.schemas
