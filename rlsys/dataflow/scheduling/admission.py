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

A group that could not be trained within the bound any more, even if it ended at once, is never
issued: while the trainer is more than η steps ahead of a sampler, the gate waits for that sampler.
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
        self._num_places = 0  # taken: groups issued less those dropped or withdrawn
        self._sampler_version = 0
        self._trainer_version = 0
        self._waits_for_samplers = False
        self._is_closed = False

    @property
    def version(self) -> int:
        """The oldest version that any sampler may still sample with."""
        return self._sampler_version

    @property
    def num_open(self) -> int:
        """Groups that may be issued now."""
        is_too_late = self._trainer_version - self._sampler_version > self._max_staleness
        if self._is_closed or self._waits_for_samplers or is_too_late:
            return 0
        bound = (self._sampler_version + self._max_staleness + 1) * self._groups_per_step
        allowed = min(bound, self._num_groups) + self._over_issue
        return max(0, allowed - self._num_places)

    def issue(self, num_groups: int = 1) -> None:
        assert num_groups <= self.num_open, "issued past the gate"
        self._num_places += num_groups

    def release(self, num_groups: int = 1) -> None:
        """Groups were dropped, and others are issued in their stead; or they were lost, and are
        issued again themselves when the gate lets them.
        """
        assert num_groups <= self._num_places, "more places given back than were taken"
        self._num_places -= num_groups

    def close(self) -> None:
        """The last step has its groups: nothing more is issued, whatever is dropped."""
        self._is_closed = True

    def trainer_at(self, version: int) -> None:
        """So many optimizer steps are done."""
        self._trainer_version = version

    def samplers_at(self, version: int) -> None:
        """Every sampler has loaded at least this version."""
        assert version >= self._sampler_version, "a sampler's version went back"
        self._sampler_version = version
        self._waits_for_samplers = False

    def restore(self, *, num_trained: int, version: int, wait_for_samplers: bool = False) -> None:
        """A history goes on after `version` optimizer steps: the groups that they trained hold
        their places, all others take theirs when they are issued again.

        wait_for_samplers: they still have weights of a history that is lost, so that nothing is
        issued before they have loaded this version.
        """
        self._num_places = num_trained
        self._trainer_version = self._sampler_version = version
        self._waits_for_samplers = wait_for_samplers
        self._is_closed = False
