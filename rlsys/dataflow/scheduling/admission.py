"""The admission gate: issues groups so that staleness stays within its bound.

A pure state machine. In: groups issued and dropped, versions that the samplers have loaded.
Out: the number of groups that may be issued now.

The bound (AReaL, 2505.24298, eq. 3): a group is issued only while

    ⌊(rollouts issued − rollouts dropped) / rollouts per step⌋ ≤ policy_version + η

All groups of a run have one size, so counting groups is equivalent. `policy_version` is the oldest
version of any sampler, not the trainer's. The k-th batch is trained at version k. So tokens of its
groups are at most η steps old if their sampler had at least version k − η at the time of issue.

`over_issue` more groups are in flight, so that a step need not wait for the slowest. The controller
then keeps the bound: it cancels groups that have become too old.

While the trainer is more than η steps ahead of a sampler, the gate waits for that sampler. Groups
issued in this time would be too old for training even if they finished at once.
"""

from __future__ import annotations

from rlsys.errors import require


class AdmissionGate:
    """Counts of issued groups against the staleness bound."""

    def __init__(
        self, *, groups_per_step: int, max_staleness: int, num_steps: int, over_issue: int = 0
    ) -> None:
        for field, value, least in (
            ("groups_per_step", groups_per_step, 1),
            ("max_staleness", max_staleness, 0),
        ):
            rule, fix = f"must be at least {least}", f"Use at least {least}."
            require(value >= least, field, value, rule=rule, fix=fix)
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._num_groups = groups_per_step * num_steps
        self._over_issue = over_issue
        self._num_places = 0  # groups issued minus those dropped or issued again
        self._sampler_version = 0
        self._trainer_version = 0
        self._waits_for_samplers = False
        self._is_closed = False

    @property
    def version(self) -> int:
        """Oldest version that any sampler may use."""
        return self._sampler_version

    @property
    def num_open(self) -> int:
        """Number of groups that may be issued now."""
        is_too_late = self._trainer_version - self._sampler_version > self._max_staleness
        if self._is_closed or self._waits_for_samplers or is_too_late:
            return 0
        bound = (self._sampler_version + self._max_staleness + 1) * self._groups_per_step
        allowed = min(bound, self._num_groups) + self._over_issue
        return max(0, allowed - self._num_places)

    def issue(self, num_groups: int = 1) -> None:
        """Count groups that are issued now."""
        assert num_groups <= self.num_open, "more groups issued than the gate allows"
        self._num_places += num_groups

    def release(self, num_groups: int = 1) -> None:
        """Count groups that were dropped, or lost and will be issued again."""
        assert num_groups <= self._num_places, "more groups released than issued"
        self._num_places -= num_groups

    def end_after(self, num_steps: int) -> None:
        """Issue only the groups of so many steps."""
        self._num_groups = self._groups_per_step * num_steps

    def close(self) -> None:
        """Issue no more groups: the last step has its groups."""
        self._is_closed = True

    def trainer_at(self, version: int) -> None:
        """Set the trainer's version: the number of optimizer steps done."""
        self._trainer_version = version

    def samplers_at(self, version: int) -> None:
        """Set the oldest version that any sampler has loaded."""
        assert version >= self._sampler_version, "a sampler's version went back"
        self._sampler_version = version
        self._waits_for_samplers = False

    def restore(self, *, num_trained: int, version: int, wait_for_samplers: bool = False) -> None:
        """Continue after `version` optimizer steps, in which `num_trained` groups were trained.

        All other groups are issued again. With `wait_for_samplers`, no group is issued before the
        samplers have loaded this version, because they have weights of steps that are undone.
        """
        self._num_places = num_trained
        self._trainer_version = self._sampler_version = version
        self._waits_for_samplers = wait_for_samplers
        self._is_closed = False
