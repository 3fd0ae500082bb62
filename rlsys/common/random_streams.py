"""Seeds of independent random streams."""

from __future__ import annotations

import hashlib


def request_seed(seed: int, group_id: int, index: int) -> int:
    """Return the seed of one rollout of a group, in [0, 2^64).

    It stays the same when a run resumes, and differs from the seeds of other rollouts and runs.
    """
    digest = hashlib.blake2b(f"{seed} {group_id} {index}".encode(), digest_size=8)
    return int.from_bytes(digest.digest())
