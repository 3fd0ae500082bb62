"""When a group may be issued: the gate that bounds staleness.

A pure state machine. In: groups issued and dropped, versions that the samplers have loaded.
Out: how many groups may be issued now.

The bound (AReaL, 2505.24298, eq. 3): a group is issued only while

    ⌊(rollouts issued − rollouts dropped) / rollouts per step⌋ ≤ policy_version + η

Counting in groups is the same, as groups of a run have one size. `policy_version` is the oldest
version that any sampler may still sample with, not the trainer's: the k-th batch is trained at
version k, so tokens of a group admitted into it are at most η steps old if their sampler had at
least version k − η when the group was issued.

`over_issue` groups more are in flight, so that the slowest need not be waited for. The bound then
rests on the controller, which cancels a group as soon as it could only be trained too late.
"""

from __future__ import annotations

from rlsys.config import require


class AdmissionGate:
    def __init__(
        self, *, groups_per_step: int, max_staleness: int, num_steps: int, over_issue: int = 0
    ) -> None:
        require(groups_per_step >= 1, f"groups_per_step={groups_per_step} must be at least 1.")
        require(max_staleness >= 0, f"max_staleness={max_staleness} must be at least 0.")
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._num_groups = groups_per_step * num_steps
        self._over_issue = over_issue
        self._num_issued = 0
        self._num_dropped = 0
        self._sampler_version = 0
        self._is_closed = False

    @property
    def version(self) -> int:
        """The oldest version that any sampler may still sample with."""
        return self._sampler_version

    @property
    def num_open(self) -> int:
        """Groups that may be issued now."""
        if self._is_closed:
            return 0
        bound = (self._sampler_version + self._max_staleness + 1) * self._groups_per_step
        allowed = min(bound, self._num_groups) + self._over_issue
        return max(0, allowed - (self._num_issued - self._num_dropped))

    def issue(self, num_groups: int = 1) -> None:
        assert num_groups <= self.num_open, "issued past the gate"
        self._num_issued += num_groups

    def drop(self, num_groups: int = 1) -> None:
        """Dropped groups free their place: others are issued in their stead."""
        assert self._num_dropped + num_groups <= self._num_issued, "dropped more than was issued"
        self._num_dropped += num_groups

    def close(self) -> None:
        """The last step has its groups: nothing more is issued, whatever is dropped."""
        self._is_closed = True

    def samplers_at(self, version: int) -> None:
        """Every sampler has loaded at least this version."""
        assert version >= self._sampler_version, "a sampler's version went back"
        self._sampler_version = version

    def restore(self, *, num_issued: int, num_dropped: int, version: int) -> None:
        self._num_issued, self._num_dropped = num_issued, num_dropped
        self._sampler_version = version
