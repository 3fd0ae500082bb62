"""A server of the real OpenEnv: `python openenv_server.py PORT MAX_SESSIONS`, in an environment
that has `openenv`. Its environment: say a number, until it is that of the seed."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import (
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)


class Say(Action):
    message: str


class Heard(Observation):
    text: str
    tries: int = 0


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        self.number = (seed or 0) % 10
        self.tries = 0
        return Heard(text="0-9?")

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
        if action.message == "crash":
            raise RuntimeError("a bug of the environment")
        self.tries += 1
        is_right = action.message == str(self.number)
        text = "yes" if is_right else "no"
        return Heard(text=text, tries=self.tries, done=is_right, reward=1.0 if is_right else -0.1)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


if __name__ == "__main__":
    app = create_fastapi_app(Guess, Say, Heard, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
