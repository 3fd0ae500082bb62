"""Sampled sequences that the server keeps for `stable_reinforce`.

    add(session, sequence_id, sequence) ──► get() by training requests ──► dropped after a day
                                                        without use, or with the session

A client samples with `record_stability_info` and names the sequences in its training data
(provenance). The loss then uses the tokens and log-probabilities that the server itself recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlsys.tinker_server.api_errors import ApiError
from rlsys.types import Float32Array, Int32Array

# The API documents that sequences can be trained on for one day after their last use.
KEEP_S = 24 * 3600.0
MAX_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class RecordedSequence:
    """A sampled sequence with its prompt. P prompt tokens, S sampled tokens."""

    prompt: Int32Array  # [P]
    token_ids: Int32Array  # [S]
    logprobs: Float32Array  # [S], of the sampler

    @property
    def num_bytes(self) -> int:
        """Size of the arrays."""
        return self.prompt.nbytes + self.token_ids.nbytes + self.logprobs.nbytes


class StabilityRecords:
    """Recorded sequences, in the order of their last use. `clock` returns monotonic seconds.

    Beyond `max_bytes`, the least recently used sequences are dropped.
    """

    def __init__(
        self, clock: Callable[[], float], *, keep_s: float = KEEP_S, max_bytes: int = MAX_BYTES
    ) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._records: dict[tuple[str, str], tuple[float, RecordedSequence]] = {}
        self._num_bytes = 0

    def add(self, session: str, sequence_id: str, sequence: RecordedSequence) -> None:
        """Record a sequence."""
        self._drop((session, sequence_id))
        self._records[session, sequence_id] = (self._clock(), sequence)
        self._num_bytes += sequence.num_bytes
        while self._num_bytes > self._max_bytes and len(self._records) > 1:
            self._drop(next(iter(self._records)))

    def get(self, session: str, sequence_id: str) -> RecordedSequence:
        """Return a sequence of this session and keep it for another day.

        Raises:
            ApiError: It is not recorded.
        """
        key = (session, sequence_id)
        if key not in self._records:
            raise ApiError(
                "sequence_id",
                sequence_id,
                rule=f"it is not recorded in session {session!r}",
                fix="Sample with record_stability_info=True in the session that trains, and train "
                "within a day.",
            )
        _, sequence = self._records.pop(key)
        self._records[key] = (self._clock(), sequence)
        return sequence

    def expire(self) -> None:
        """Drop the sequences that were not used for `keep_s`."""
        limit_s = self._clock() - self._keep_s
        for key, (used_s, _) in list(self._records.items()):
            if used_s > limit_s:
                break
            self._drop(key)

    def drop_all_of(self, session: str) -> None:
        """Drop the sequences of a session."""
        for key in [key for key in self._records if key[0] == session]:
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        found = self._records.pop(key, None)
        if found is not None:
            self._num_bytes -= found[1].num_bytes
