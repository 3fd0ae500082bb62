"""A taskset and a harness for the real verifiers: say the number of the task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["LittleHarness", "LittleTaskset"]


class LittleData(vf.TaskData):
    answer: str


class LittleTask(vf.Task[LittleData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: Any) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def short(self, trace: Any) -> float:
        return float(len(trace.last_reply) < 3)


class LittleTaskset(vf.Taskset[LittleTask]):
    def load(self) -> Iterable[Any]:
        for n in range(5):
            data = LittleData(prompt=f"Say {n}.", answer=str(n))
            yield LittleTask(data, self.config.task)


class LittleHarness(vf.Harness[vf.HarnessConfig]):
    """Asks once, in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *others: Any
    ) -> Any:
        data = next(one for one in others if hasattr(one, "prompt"))
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        await client.chat.completions.create(
            model=ctx.model, messages=[{"role": "user", "content": data.prompt}]
        )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
