"""A server that speaks OpenEnv's WebSocket protocol as its `core/env_server/types.py` defines it
(0.10), for the default suite: the real one has 60 packages. The same environment as
openenv_server.py, and its errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from websockets.asyncio.server import ServerConnection, serve


@contextlib.asynccontextmanager
async def stub(max_sessions: int) -> AsyncIterator[tuple[str, list[int]]]:
    """(url, number of sessions that are open)."""
    sessions = [0]

    async def session(socket: ServerConnection) -> None:
        if sessions[0] >= max_sessions:
            await say(socket, "error", {"message": "full", "code": "CAPACITY_REACHED"})
            return
        sessions[0] += 1
        try:
            await play(socket)
        finally:
            sessions[0] -= 1

    async with serve(session, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"http://127.0.0.1:{port}", sessions


async def play(socket: ServerConnection) -> None:
    number = tries = 0
    async for raw in socket:
        message = json.loads(raw)
        data = message["data"] if message["type"] != "close" else {}
        match message["type"]:
            case "reset":
                number, tries = data["seed"] % 10, 0
                await observe(socket, {"text": "0-9?", "tries": 0}, None, False)
            case "step" if set(data) != {"message"} or not isinstance(data["message"], str):
                errors = [{"loc": list(data), "msg": "Extra inputs are not permitted"}]
                error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
                await say(socket, "error", error)
            case "step" if data["message"] == "crash":
                error = {"message": "a bug of the environment", "code": "EXECUTION_ERROR"}
                await say(socket, "error", error)
            case "step":
                tries += 1
                is_right = data["message"] == str(number)
                observation = {"text": "yes" if is_right else "no", "tries": tries}
                await observe(socket, observation, 1.0 if is_right else -0.1, is_right)
            case "close":
                return


async def observe(
    socket: ServerConnection, observation: dict[str, Any], reward: float | None, done: bool
) -> None:
    await say(socket, "observation", {"observation": observation, "reward": reward, "done": done})


async def say(socket: ServerConnection, kind: str, data: dict[str, Any]) -> None:
    await socket.send(json.dumps({"type": kind, "data": data}))
