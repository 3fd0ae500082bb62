"""Seeds of independent random streams."""

from __future__ import annotations

import hashlib


def request_seed(seed: int, group_id: int, index: int) -> int:
    """Of one rollout of a group, in [0, 2^64): the same in every life of a run, and unlike those of
    all other rollouts, of runs with this and any other seed.
    """
    digest = hashlib.blake2b(f"{seed} {group_id} {index}".encode(), digest_size=8)
    return int.from_bytes(digest.digest())
