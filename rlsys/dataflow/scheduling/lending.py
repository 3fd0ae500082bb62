"""Policy of `rollout.borrow`: it decides when the trainer's devices generate.

A pure state machine with an injected clock. In: the groups that the step still lacks, sampled
tokens, and measured times of training and of hand-overs. Out: whether to lend the devices to the
borrowed replicas, to take them back, or to wait.

    a step begins ─► waits ──predicted wait > cost──► lends ──rest ≤ training + give back──► trains
                       └──────────groups are ready, or the wait is too short──────────────────┘

Predictions come from the earlier steps of the run. For each number of missing groups, the policy
keeps the replica-seconds in which the replicas sampled the rest of the step. They are divided by
the number of replicas that sample, so steps with and without lending teach the same numbers.

Training of the first parts of a step can run before its last group arrives, once the groups of the
first part are there. The devices are taken back so early that this training ends when the last
group arrives, and not before the first part is complete. If rollouts cannot move (`drains`), the
devices are taken back when the borrowed replicas have finished theirs.

Borrowed replicas can slow the own replicas down, for example on shared cores. Therefore the policy
keeps the rate of the own replicas alone, in tokens per second while the trainer is idle. The tokens
that all replicas sample during a hand-over, divided by this rate, give the time that the own
replicas would have needed. If hand-overs take longer than that, the policy pauses for some steps.
After every `control_every` steps with lending, one step is not lent, so that the rate is measured
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

# Reasons for a step without lending.
NOT_MEASURED = "not_measured"  # the run has not measured its steps and a load of weights yet
NO_REPLICA = "no_replica"  # no borrowed replica is left
NO_WAIT = "no_wait"  # the groups arrive before the trainer needs them
TOO_SHORT = "too_short"  # the trainer waits, but not long enough for a hand-over
NO_GAIN = "no_gain"  # the last hand-overs took longer than the own replicas alone would have needed
CONTROL = "control"  # the step measures the own replicas alone

# Smallest time to wait for: rounding could repeat a shorter wait without end.
TICK_S = 1e-3

NUM_QUARTERS = 4  # of the groups of a step

# A step lends only after the own replicas alone were measured for this share of a step's time.
MEASURED_SHARE = 0.25

# train: send the groups to the trainer. hold: keep them, since the devices are or will be lent.
Action = Literal["train", "hold", "lend", "take_back"]


@dataclass(frozen=True, kw_only=True)
class LendingSettings:
    """Parameters of the policy. `scripts/plan/simulate_lending.py` has chosen the defaults.

    Attributes:
        margin: Smallest ratio of the predicted wait to the cost of a hand-over.
        weight: Weight of the newest measurement in all means.
        prior_loads: Assumed time of the first hand-over and of the first return, in loads of
            weights into a replica. A hand-over is a release of the trainer's memory and a load.
        least_limit_s: Smallest time limit of a hand-over and of a return.
        limit_ratio: The limit, in means of the measured times.
        least_gain: Mean time that hand-overs save, relative to their own, below which lending
            pauses. It is below zero, because completions of different lengths make it uncertain.
        least_hand_overs: Hand-overs before the first pause.
        pause_steps: Steps without lending in the first pause. Each further one is twice as long.
        longest_pause_steps: Steps of the longest pause. After as many steps whose wait is too
            short, the costs of a hand-over are assumed again.
        control_every: Steps with lending after which one without lending follows.
    """

    margin: float = 2.0
    weight: float = 0.3
    prior_loads: float = 2.0
    least_limit_s: float = 5.0
    limit_ratio: float = 5.0
    least_gain: float = -0.05
    least_hand_overs: int = 3
    pause_steps: int = 8
    longest_pause_steps: int = 64
    control_every: int = 32


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Decision of the policy.

    It holds until a group arrives, the trainer ends or `after_s` have passed.
    """

    action: Action
    after_s: float | None = None


class _AloneRate:
    """Tokens per second of the own replicas alone, by quarter of a step.

    The last groups of a step leave some replicas without work, so each quarter has its own rate.
    Newer steps count more.
    """

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self.clear()

    def clear(self) -> None:
        """Forget all measurements."""
        self._tokens = [0.0] * NUM_QUARTERS
        self._seconds = [0.0] * NUM_QUARTERS
        self._is_new_step = False

    def begin_step(self) -> None:
        """Let the measurements so far count less once this step adds to them."""
        self._is_new_step = True

    @property
    def seconds(self) -> float:
        """Return the measured time."""
        return sum(self._seconds)

    def add(self, quarter: int, *, tokens: int = 0, seconds: float = 0.0) -> None:
        """Add tokens or time to a quarter."""
        if self._is_new_step and seconds > 0:
            self._is_new_step = False
            self._tokens = [(1 - self._weight) * one for one in self._tokens]
            self._seconds = [(1 - self._weight) * one for one in self._seconds]
        self._tokens[quarter] += tokens
        self._seconds[quarter] += seconds

    def of(self, quarter: int) -> float | None:
        """Return the rate in a quarter, or in the nearest one with a rate; None if unknown."""
        known = [
            one for one in range(NUM_QUARTERS) if self._tokens[one] > 0 and self._seconds[one] > 0
        ]
        if not known:
            return None
        nearest = min(known, key=lambda one: abs(one - quarter))
        return self._tokens[nearest] / self._seconds[nearest]


class LendingPolicy:
    """State of one run. All times are in seconds.

    Args:
        num_own: Replicas with devices of their own.
        drains: Whether borrowed replicas finish their rollouts before they return the devices.
        clock: Returns the present time.
    """

    def __init__(
        self,
        *,
        num_own: int,
        drains: bool = False,
        clock: Callable[[], float],
        settings: LendingSettings | None = None,
    ) -> None:
        self._settings = settings or LendingSettings()
        self._num_own = num_own
        self._drains = drains
        self._clock = clock
        self._num_awake = 0
        self._is_lent = False
        self._now_s = clock()
        self._sampled = 0.0  # replica-seconds since the start of the run
        self._missing = 0  # groups
        self._marks: dict[int, float] = {}  # `_sampled` when so many groups began to be missing
        self._rest: dict[int, float] = {}  # mean replica-seconds from then to the step's last group
        self._load_s: float | None = None
        self._wake_s: float | None = None
        self._return_s: float | None = None
        self._overlap_s: float | None = None  # training of all parts but the last
        self._num_missing_first = 0  # groups that miss when the first part is complete
        self._late_s = 0.0  # mean time for which the complete step waited for the devices
        self._reason = NOT_MEASURED
        self._is_idle = False  # whether the trainer waits for the step's first part
        self._has_waited = False  # whether an idle trainer was refused in this step
        self._alone = _AloneRate(self._settings.weight)
        self._is_measured = False  # whether `_alone` was known when the step began
        self._num_begun = 0  # steps
        self._num_wanted = 1  # groups that the step lacked when it began
        self._lent_at_s = 0.0
        self._own_needs_s = 0.0  # time of the own replicas for this hand-over's tokens
        self._gain: float | None = None  # mean time that hand-overs save, relative to their own
        self._num_hand_overs = 0
        self._was_too_short = False  # whether the wait of this step was too short once
        self._num_too_short = 0  # steps in a row
        self._num_lent = 0  # hand-overs since the last step that was skipped
        self._pause_steps = self._settings.pause_steps
        self._skipped_until = 0  # step
        self._skip_reason = CONTROL

    @property
    def is_lent(self) -> bool:
        """Return whether the devices are lent, or are being handed over."""
        return self._is_lent

    @property
    def reason(self) -> str:
        """Return why the devices were not lent in this step."""
        return self._reason

    @property
    def limit_s(self) -> float:
        """Return the time after which a hand-over or a return counts as failed."""
        longest = max(self._wake_cost_s, self._return_cost_s)
        return max(self._settings.least_limit_s, self._settings.limit_ratio * longest)

    @property
    def cost_s(self) -> float:
        """Return the predicted time of a hand-over and of the return."""
        return self._wake_cost_s + self._return_cost_s + self._late_s

    @property
    def own_s(self) -> float | None:
        """Return the time in which the own replicas alone complete the step; None if unknown."""
        if not self._rest or self._missing == 0:
            return None if self._missing else 0.0
        begun = self._marks.get(self._missing, self._sampled)
        rest = self._rest_of(self._missing) - (self._sampled - begun)
        return max(rest, self._rest_of(self._missing - 1), 0.0) / self._num_own

    def wait_s(self, num_borrowed: int) -> float | None:
        """Return the predicted wait that so many borrowed replicas could use; None if unknown."""
        own_s = self.own_s
        if own_s is None or self._overlap_s is None:
            return None
        if self._drains:  # the training that the wait would hide follows the last group
            return own_s * num_borrowed / (self._num_own + num_borrowed) - self._overlap_s
        return max(own_s - self._overlap_s, self._until_first_s(own_s))

    def missing(self, num_groups: int, *, begins: bool = False) -> None:
        """Record how many groups the step lacks now; `begins` starts a step."""
        self._advance()
        if begins:
            self._begin_step(num_groups)
            self._marks = {num_groups: self._sampled}
        else:
            for one in range(num_groups, self._missing):
                self._marks[one] = self._sampled
        self._missing = num_groups
        if num_groups == 0 and not begins:
            self._learn()

    def sampled(self, num_tokens: int) -> None:
        """Record tokens that replicas have sampled, own or borrowed."""
        self._advance()
        if self._is_lent:
            if (rate := self._alone.of(self._quarter)) is not None:
                self._own_needs_s += num_tokens / rate
        elif self._is_idle:
            self._alone.add(self._quarter, tokens=num_tokens)

    def trains(self) -> None:
        """Record that the first part of the step is sent: the trainer does not wait any more."""
        self._advance()
        self._is_idle = False

    def loaded(self, seconds: float) -> None:
        """Record the time of a load of weights, the prior of the first hand-over."""
        self._load_s = seconds

    def trained(self, seconds: float, *, num_parts: int, num_missing_first: int) -> None:
        """Record the passes of a step in `num_parts` parts.

        `num_missing_first` groups are missing when the first part can be trained.
        """
        before_last = seconds * (1 - 1 / num_parts) if num_parts else 0.0
        self._overlap_s = self._mean(self._overlap_s, before_last)
        self._num_missing_first = num_missing_first

    def lends(self) -> None:
        """Record that a hand-over begins."""
        self._advance()
        self._is_lent, self._was_too_short = True, False
        self._lent_at_s, self._own_needs_s = self._now_s, 0.0

    def handed_over(self, seconds: float, *, num_awake: int) -> None:
        """Record the end of a hand-over, after which so many borrowed replicas sample."""
        self._advance()
        self._num_awake = num_awake
        self._wake_s = self._mean(self._wake_s, seconds)

    def gave_back(self, seconds: float, *, late_s: float) -> None:
        """Record a return, of which `late_s` passed after the step's last group."""
        self._advance()
        self._is_lent, self._num_awake = False, 0
        self._return_s = self._mean(self._return_s, seconds)
        self._late_s = self._mean(self._late_s, late_s) or 0.0
        lent_s = self._now_s - self._lent_at_s
        if lent_s > 0:
            self._judge(self._own_needs_s / lent_s - 1)

    def decide(self, *, is_idle: bool, num_borrowed: int, is_sampling: bool = False) -> Decision:
        """Decide for the present, before the first part of a step is sent to the trainer.

        `num_borrowed` replicas on the trainer's devices are alive, and `is_sampling` if one has
        requests. Only an idle trainer can lend. If it still works on the previous step, the groups
        are held until it has ended.
        """
        self._advance()
        self._is_idle = is_idle
        if self._is_lent:
            is_drained = not (self._drains and is_sampling and self._missing)
            return self._keep(self.own_s) if is_drained else Decision(action="hold")
        if num_borrowed == 0:
            return self._refuse(NO_REPLICA)
        wait_s = self.wait_s(num_borrowed)
        if wait_s is None or self._load_s is None:
            return self._refuse(NOT_MEASURED)
        if self._num_begun <= self._skipped_until:
            return self._refuse(self._skip_reason)
        if self._missing == 0 or wait_s <= 0:
            return self._refuse(NO_WAIT)
        if wait_s < self._settings.margin * self.cost_s:
            self._was_too_short = True
            return self._refuse(TOO_SHORT)
        if not self._is_measured:
            return self._refuse(NOT_MEASURED)
        self._reason = ""
        return Decision(action="lend" if is_idle else "hold")

    def _begin_step(self, num_groups: int) -> None:
        if self._num_begun == 1:  # the first step also warms the replicas up
            self._alone.clear()
        alone_s = self._rest_of(num_groups) / self._num_own if self._rest else 0.0
        self._num_too_short = self._num_too_short + 1 if self._was_too_short else 0
        self._was_too_short = False
        if self._num_too_short >= self._settings.longest_pause_steps:  # the costs may have changed
            self._wake_s = self._return_s = None
            self._late_s, self._num_too_short = 0.0, 0
        self._is_measured = self._alone.seconds > MEASURED_SHARE * alone_s
        self._alone.begin_step()
        self._num_begun += 1
        self._num_wanted = max(1, num_groups)
        self._is_idle = self._has_waited = False

    def _judge(self, gain: float) -> None:
        """Decide after a hand-over, which has saved this share of its time, whether to pause."""
        settings = self._settings
        self._num_lent += 1
        self._num_hand_overs += 1
        self._gain = self._mean(self._gain, gain)
        is_sure = self._num_hand_overs >= settings.least_hand_overs
        if is_sure and self._gain < settings.least_gain:
            self._skip(NO_GAIN, self._pause_steps)
            self._pause_steps = min(2 * self._pause_steps, settings.longest_pause_steps)
            return
        self._pause_steps = settings.pause_steps
        if self._num_lent >= settings.control_every:
            self._skip(CONTROL, 1)

    def _skip(self, reason: str, num_steps: int) -> None:
        self._skip_reason, self._skipped_until = reason, self._num_begun + num_steps
        self._num_lent = 0

    @property
    def _quarter(self) -> int:
        """Return the present quarter of the step: 0 is the last."""
        return max(0, -(-NUM_QUARTERS * self._missing // self._num_wanted) - 1)

    def _keep(self, own_s: float | None) -> Decision:
        """Decide while the devices are lent."""
        if self._missing == 0 or own_s is None:
            return Decision(action="take_back")
        # How much longer the replicas sample before the return begins.
        return_s = self._return_cost_s + self._late_s
        latest_s = (self._overlap_s or 0.0) + return_s
        early_s = max(own_s - latest_s, self._until_first_s(own_s) - return_s)
        if early_s <= TICK_S:
            return Decision(action="take_back")
        # Without another group, the rest never falls below that of one group less.
        floor_s = self._rest_of(self._missing - 1) / self._num_own
        if max(floor_s - latest_s, self._until_first_s(floor_s) - return_s) > 0:
            return Decision(action="hold")
        rate = (self._num_own + self._num_awake) / self._num_own
        return Decision(action="hold", after_s=early_s / rate)

    def _until_first_s(self, own_s: float) -> float:
        """Return the time until the first part is complete, given the time of the whole rest."""
        if self._missing <= self._num_missing_first:
            return 0.0
        return max(0.0, own_s - self._rest_of(self._num_missing_first) / self._num_own)

    def _refuse(self, reason: str) -> Decision:
        """Keep the first reason for which an idle trainer waits: the wait causes later ones."""
        if not self._has_waited:
            self._reason = reason
        self._has_waited |= self._is_idle and self._missing > 0
        return Decision(action="train")

    def _rest_of(self, missing: int) -> float:
        """Return the mean replica-seconds of so many groups, in proportion to the nearest known."""
        if missing <= 0:
            return 0.0
        if missing in self._rest:
            return self._rest[missing]
        nearest = min(self._rest, key=lambda known: (abs(known - missing), known))
        return self._rest[nearest] * missing / nearest

    def _learn(self) -> None:
        """Add the step whose last group has arrived to the means."""
        for missing, begun in self._marks.items():
            if missing:
                took = self._sampled - begun
                self._rest[missing] = self._mean(self._rest.get(missing), took) or 0.0

    def _advance(self) -> None:
        now_s = self._clock()
        passed_s, self._now_s = now_s - self._now_s, now_s
        self._sampled += passed_s * (self._num_own + self._num_awake)
        if self._is_idle and not self._is_lent:
            self._alone.add(self._quarter, seconds=passed_s)

    @property
    def _wake_cost_s(self) -> float:
        if self._wake_s is None:
            return self._settings.prior_loads * (self._load_s or 0.0)
        return self._wake_s

    @property
    def _return_cost_s(self) -> float:
        if self._return_s is None:
            return self._settings.prior_loads * (self._load_s or 0.0)
        return self._return_s

    def _mean(self, old: float | None, new: float) -> float:
        weight = self._settings.weight
        return new if old is None else (1 - weight) * old + weight * new
