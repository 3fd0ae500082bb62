"""Asynchronous reinforcement learning for language models on Ray."""

from rlsys.rewards import example_rollout, reward
from rlsys.types import Rollout

__all__ = ["Rollout", "example_rollout", "reward"]
