"""Asynchronous reinforcement learning for language models on Ray."""

import rlsys.interrupts  # noqa: F401  (before the modules whose imports take seconds)
from rlsys.rewards import reward
from rlsys.types import Rollout

__all__ = ["Rollout", "reward"]
