"""The tools of an environment, as its episodes use them: calls out of replies, answers to calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.environments.environment import Environment
from rlsys.environments.tools.tool_formats import chosen_format
from rlsys.environments.tools.tools import Execute, ToolSet


class ToolUse:
    """`template`: the chat template's text, which tells how the model writes calls; None where
    texts stand as they are. `is_shown`: it renders the tools, too; where it does not, the
    environment tells the model of them in a message. `execute` runs plain tools. Raises ValueError
    for tools without a format to call them in.
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
        """Start the servers whose tools are among them. Raises ValueError where one does not."""
        await self._tools.open()
        self._render()

    async def close(self) -> None:
        await self._tools.close()

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """What the chat template renders; the same object each time."""
        return self._schemas if self._is_shown else ()

    def split_calls(self, message: dict[str, Any], *, num_before: int = 0) -> None:
        """Take the calls out of a sampled message's content. `num_before`: calls of the episode so
        far, so that ids differ.
        """
        if self._format is None:
            return
        reply = self._format.parse(message["content"], self._schemas, num_before=num_before)
        if reply.calls:
            message["content"] = reply.content
            message["tool_calls"] = reply.tool_calls

    async def call_all(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A tool message for each call, in their order."""
        return await self._tools.call_all(calls)

    def _render(self) -> None:
        self._schemas = self._tools.schemas
