"""How many requests an engine runs at once, found from the time that its preemptions waste.

    engine ── seconds, recomputed tokens, ended requests ──► AdmissionWindow ──► running requests

An engine such as vLLM starts requests while its cache has room for their prompts. They grow, the
cache becomes full, and the newest lose their keys and values and are computed again. Fewer running
requests waste less, but use the device less. So a preemption cuts the limit only while much time is
wasted, and ended requests raise it again. An engine that wastes no time has no limit.

Pure state machines. Additive increase and multiplicative decrease (Chiu and Jain, 1989), as in
prime-rl's orchestrator.
"""

from __future__ import annotations

# A cut keeps this part of the running requests.
KEPT = 0.9

# Share of the time for recomputed tokens that is tolerated. A cut costs up to 1 - KEPT of the
# throughput, if a step takes the same time for any number of requests, and avoids a part of the
# waste only. With 0.1, some engines of scripts/bench/preemptions.py became up to 10 % slower; with
# 0.2 none did.
TOLERATED = 0.2

# Growth of the limit with each ended request. A slower growth keeps the limit low for too long
# after a burst of preemptions.
GROWTH = 0.3

# Shares are taken over the time in which so many times the running requests end.
MEMORY = 4.0

# Weight of a new decode step in the mean time of steps without a prefill.
SMOOTHING = 0.05

NO_LIMIT = 1 << 30


class AdmissionWindow:
    """The limit of the requests that an engine runs at once."""

    def __init__(self) -> None:
        self.limit = NO_LIMIT
        self._exact = 0.0  # the limit with its fraction, once there is one
        self._worked_s = self._wasted_s = 0.0

    @property
    def wasted_share(self) -> float:
        """Recent share of the time for tokens that were computed again."""
        return self._wasted_s / self._worked_s if self._worked_s else 0.0

    def worked(self, seconds: float, *, wasted_s: float = 0.0) -> None:
        """Count time, and the part of it for tokens that were computed again."""
        self._worked_s += seconds
        self._wasted_s += wasted_s

    def preempted(self, num_running: int) -> None:
        """Cut the limit after a preemption that has left so many running, if much is wasted.

        While more run than the limit allows, the requests of before the cut are in excess, and
        their preemptions say nothing about the new limit.
        """
        if num_running > self.limit or self.wasted_share <= TOLERATED:
            return
        self._exact = max(1.0, KEPT * num_running)
        self.limit = int(self._exact)
        self._worked_s = self._wasted_s = 0.0

    def ended(self, num_ended: int, *, num_running: int, is_binding: bool) -> None:
        """Count ended requests, and raise the limit if it binds and little time is wasted."""
        kept = max(0.0, 1 - num_ended / (MEMORY * max(1, num_running)))
        self._worked_s *= kept
        self._wasted_s *= kept
        if self.limit < NO_LIMIT and is_binding and self.wasted_share <= TOLERATED:
            self._exact += GROWTH * num_ended
            self.limit = int(self._exact)


class StepTimes:
    """Estimate of the time that recomputed tokens take in an engine that mixes them with others.

    A step takes longer by its prefill than the mean of steps without one.
    """

    def __init__(self) -> None:
        self._decode_s: float | None = None

    def wasted_s(self, seconds: float, *, num_prefill: int, num_recomputed: int) -> float:
        """Return the part of a step's time for `num_recomputed` of its prefill tokens."""
        if not num_prefill:
            before = seconds if self._decode_s is None else self._decode_s
            self._decode_s = before + SMOOTHING * (seconds - before)
            return 0.0
        if self._decode_s is None:  # nothing to compare with
            return 0.0
        return max(0.0, seconds - self._decode_s) * num_recomputed / num_prefill
