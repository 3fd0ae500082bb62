"""Asynchronous reinforcement learning for language models on Ray."""

from rlsys.rewards import reward
from rlsys.types import Rollout

__all__ = ["Rollout", "reward"]
