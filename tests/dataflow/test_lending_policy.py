"""The policy of lending: numbers by hand, and properties of random histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.dataflow.scheduling.lending import (
    CONTROL,
    NO_GAIN,
    NO_REPLICA,
    NO_WAIT,
    NOT_MEASURED,
    TICK_S,
    TOO_SHORT,
    Decision,
    LendingPolicy,
    LendingSettings,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def policy_of(clock: Clock, *, own: int = 2, margin: float = 2.0) -> LendingPolicy:
    settings = LendingSettings(
        margin=margin,
        weight=0.5,
        prior_loads=3.0,
        least_hand_overs=2,
        pause_steps=2,
        longest_pause_steps=4,
        control_every=3,
    )
    return LendingPolicy(num_own=own, clock=clock, settings=settings)


def decide(policy: LendingPolicy, *, is_idle: bool = True, num_borrowed: int = 2) -> Decision:
    return policy.decide(is_idle=is_idle, num_borrowed=num_borrowed)


def sample_step(policy: LendingPolicy, clock: Clock, *, groups: int, group_s: float) -> None:
    """Let the groups of a step arrive at equal distances, of 100 tokens each, without lending."""
    policy.missing(groups, begins=True)
    decide(policy)
    for left in reversed(range(groups)):
        clock.now_s += group_s
        policy.sampled(100)
        policy.missing(left)
    policy.trains()


def lend_step(
    policy: LendingPolicy,
    clock: Clock,
    *,
    groups: int,
    group_s: float,
    wake_s: float = 0.0,
    return_s: float = 0.0,
) -> bool:
    """Let a step begin, and lend in it if the policy does; return whether it did.

    The policy learns the time `wake_s` of the hand-over, but the clock does not count it.
    """
    policy.missing(groups, begins=True)
    lends = decide(policy).action == "lend"
    if lends:
        policy.lends()
        policy.handed_over(wake_s, num_awake=2)
    for left in reversed(range(groups)):
        clock.now_s += group_s
        policy.sampled(100)
        policy.missing(left)
    if lends:
        clock.now_s += return_s
        policy.gave_back(return_s, late_s=0.0)
    assert decide(policy).action == "train"  # all groups are there
    policy.trains()
    return lends


def measured(clock: Clock, *, num_missing_first: int = 8) -> LendingPolicy:
    """A policy after two steps, in which ten groups took a second each; a load takes 0.1 s."""
    policy = policy_of(clock)
    groups = 10
    for _ in range(2):
        sample_step(policy, clock, groups=groups, group_s=1.0)
    policy.loaded(0.1)
    policy.trained(4.0, num_parts=4, num_missing_first=num_missing_first)
    policy.missing(groups, begins=True)
    return policy


def test_a_step_without_measurements_is_not_lent() -> None:
    clock = Clock()
    policy = policy_of(clock)
    sample_step(policy, clock, groups=4, group_s=1.0)
    assert policy.reason == NOT_MEASURED
    sample_step(policy, clock, groups=4, group_s=1.0)
    policy.trained(1.0, num_parts=1, num_missing_first=0)
    policy.missing(4, begins=True)
    assert decide(policy).action == "train"  # no load of weights was measured
    assert policy.reason == NOT_MEASURED
    policy.loaded(0.1)
    assert decide(policy).action == "lend"


def test_the_first_step_measures_nothing_because_replicas_warm_up() -> None:
    clock = Clock()
    policy = policy_of(clock)
    policy.loaded(0.1)
    policy.trained(1.0, num_parts=1, num_missing_first=0)
    sample_step(policy, clock, groups=4, group_s=2.0)
    policy.missing(4, begins=True)
    assert decide(policy).action == "train"
    assert policy.reason == NOT_MEASURED
    # The rate is that of the second step: hand-overs at a lower rate save nothing.
    sample_step(policy, clock, groups=4, group_s=1.0)
    assert [lend_step(policy, clock, groups=4, group_s=1.1) for _ in range(3)] == [
        True,
        True,
        False,
    ]
    assert policy.reason == NO_GAIN


def test_a_long_wait_is_lent() -> None:
    clock = Clock()
    policy = measured(clock)
    # The wait is 10 s, less 3 s of training before the last group. The costs are 2 x 3 x 0.1 s.
    assert policy.wait_s(2) == pytest.approx(7.0)
    assert policy.cost_s == pytest.approx(0.6)
    assert decide(policy, is_idle=False).action == "hold"
    assert decide(policy).action == "lend"


def test_a_wait_below_the_margin_is_not_lent() -> None:
    clock = Clock()
    policy = measured(clock)
    policy.loaded(0.6)  # costs 3.6 s, and 2 x 3.6 > 7
    assert decide(policy).action == "train"
    assert policy.reason == TOO_SHORT


def test_ready_groups_are_trained() -> None:
    clock = Clock()
    policy = measured(clock)
    policy.missing(0)
    assert decide(policy).action == "train"
    assert policy.reason == NO_WAIT


def test_without_replicas_nothing_is_lent() -> None:
    clock = Clock()
    policy = policy_of(clock)
    policy.missing(4, begins=True)
    assert decide(policy, num_borrowed=0).action == "train"
    assert policy.reason == NO_REPLICA


def test_the_devices_are_taken_back_when_training_fills_the_rest() -> None:
    clock = Clock()
    policy = measured(clock)
    policy.lends()
    policy.handed_over(0.0, num_awake=2)
    # 10 groups need 20 replica-seconds. Training and the return take 3.3 s, in which two replicas
    # sample 6.6 of them. Four replicas sample a group in 0.5 s.
    missing = 10
    while (decision := decide(policy)).action == "hold" and decision.after_s is None:
        clock.now_s += 0.5
        policy.sampled(100)
        missing -= 1
        policy.missing(missing)
    # Four groups miss, 8 replica-seconds: 0.35 s of four replicas until 6.6 are left.
    assert missing == 4
    assert decision.after_s == pytest.approx(0.35)
    clock.now_s += 0.36
    assert decide(policy).action == "take_back"
    policy.gave_back(0.4, late_s=0.0)
    assert not policy.is_lent
    assert decide(policy).action == "train"
    assert policy.reason == TOO_SHORT


def test_the_devices_are_not_taken_back_before_a_part_is_complete() -> None:
    clock = Clock()
    policy = measured(clock, num_missing_first=2)
    policy.lends()
    policy.handed_over(0.0, num_awake=2)
    policy.missing(4)
    clock.now_s += 0.36
    # Training could fill the rest, but it has nothing to train before two more groups are there.
    decision = decide(policy)
    assert decision.action == "hold"
    policy.missing(3)
    decision = decide(policy)
    # The group that completes the part takes 0.5 s on four replicas, the return 0.3 s on two.
    assert decision.after_s == pytest.approx((1.0 - 0.3) / 2)


def test_rollouts_that_cannot_move_end_before_the_devices_return() -> None:
    clock = Clock()
    settings = LendingSettings(margin=2.0, prior_loads=3.0)
    policy = LendingPolicy(num_own=2, drains=True, clock=clock, settings=settings)
    for _ in range(2):
        sample_step(policy, clock, groups=10, group_s=1.0)
    policy.loaded(0.1)
    policy.trained(4.0, num_parts=4, num_missing_first=8)
    policy.missing(10, begins=True)
    # Four replicas need 5 s instead of 10. 3 s of training that the wait would hide follow.
    assert decide(policy).action == "lend"
    policy.trained(16.0, num_parts=4, num_missing_first=8)  # a mean of 6.6 s before the last part
    assert decide(policy).action == "train"
    policy.lends()
    policy.handed_over(0.0, num_awake=2)
    policy.missing(1)
    assert policy.decide(is_idle=True, num_borrowed=2, is_sampling=True).action == "hold"
    assert policy.decide(is_idle=True, num_borrowed=2, is_sampling=False).action == "take_back"
    policy.missing(0)
    assert policy.decide(is_idle=True, num_borrowed=2, is_sampling=True).action == "take_back"


def test_an_overdue_group_counts_as_about_to_arrive() -> None:
    clock = Clock()
    policy = measured(clock)
    policy.lends()
    policy.handed_over(0.0, num_awake=2)
    policy.missing(5)
    clock.now_s += 100.0
    decision = decide(policy)
    # Four groups more need 4 s on two replicas, which is longer than training and the return.
    assert decision.action == "hold"
    assert decision.after_s is None


def test_a_return_that_came_too_late_begins_earlier_the_next_time() -> None:
    clock = Clock()
    policy = measured(clock)
    before = policy.cost_s
    policy.lends()
    policy.handed_over(0.3, num_awake=2)
    policy.gave_back(0.3, late_s=1.0)
    assert policy.cost_s == pytest.approx(before + 1.0 * 0.5)


def test_steps_with_and_without_lending_teach_the_same() -> None:
    clock = Clock()
    alone, lent = measured(clock), measured(clock)
    sample_step(alone, clock, groups=10, group_s=1.0)
    lent.missing(10, begins=True)
    lent.lends()
    lent.handed_over(0.0, num_awake=2)
    for left in reversed(range(10)):
        clock.now_s += 0.5
        lent.missing(left)
    lent.gave_back(0.0, late_s=0.0)
    for policy in (alone, lent):
        policy.missing(10, begins=True)
    assert alone.own_s == pytest.approx(10.0)
    assert lent.own_s == pytest.approx(10.0)


def test_hand_overs_without_gain_pause_lending() -> None:
    clock = Clock()
    policy = measured(clock)
    # The own replicas sample 100 tokens per second, and all replicas together 91. Steps of a pause
    # have the former rate.
    lent = []
    for step in range(13):
        is_paused = step in (2, 3, 5, 6, 7, 8, 10, 11, 12)
        if lend_step(policy, clock, groups=10, group_s=1.0 if is_paused else 1.1):
            lent.append(step)
    # Two hand-overs, then pauses of two and of four steps, the longest.
    assert lent == [0, 1, 4, 9]
    assert policy.reason == NO_GAIN
    # Twice as fast: each step lends, and after the third one follows a step for comparison.
    steps = [lend_step(policy, clock, groups=10, group_s=one) for one in (1.0, 0.5, 0.5, 0.5)]
    assert steps == [False, True, True, True]
    assert not lend_step(policy, clock, groups=10, group_s=1.0)
    assert policy.reason == CONTROL
    assert lend_step(policy, clock, groups=10, group_s=0.5)


def test_a_hand_over_that_costs_more_than_it_saves_is_no_gain() -> None:
    clock = Clock()
    policy = measured(clock)
    for _ in range(2):  # 2 s less than alone, and a return of 3 s
        assert lend_step(policy, clock, groups=10, group_s=0.8, return_s=3.0)
    policy.missing(10, begins=True)
    assert decide(policy).action == "train"
    assert policy.reason == NO_GAIN


def test_costs_that_were_too_high_are_forgotten_after_some_steps() -> None:
    clock = Clock()
    policy = measured(clock)
    # A slow start, against a wait of 7 s.
    assert lend_step(policy, clock, groups=10, group_s=0.5, wake_s=6.0)
    steps = [lend_step(policy, clock, groups=10, group_s=1.0) for _ in range(4)]
    assert steps == [False] * 4
    assert policy.reason == TOO_SHORT
    assert lend_step(policy, clock, groups=10, group_s=0.5)


def test_a_trainer_that_is_the_bottleneck_is_the_reason() -> None:
    """Its idle time is never measured, because it has none."""
    clock = Clock()
    policy = policy_of(clock)
    policy.loaded(0.1)
    for _ in range(4):
        policy.missing(4, begins=True)
        decide(policy, is_idle=False)
        clock.now_s += 8.0
        policy.missing(0)
        assert decide(policy).action == "train"
        policy.trains()
        policy.trained(8.0, num_parts=1, num_missing_first=0)
    assert policy.reason == NO_WAIT


def test_the_last_groups_are_compared_with_the_last_groups() -> None:
    """At the end of a step few rollouts run, with or without lending."""
    clock = Clock()
    policy = policy_of(clock)

    def sample() -> None:
        for left in reversed(range(8)):
            clock.now_s += 1.0 if left >= 2 else 10.0  # the last two take long either way
            policy.sampled(100)
            policy.missing(left)

    for _ in range(2):
        policy.missing(8, begins=True)
        decide(policy)
        sample()
        policy.trains()
    policy.loaded(0.1)
    policy.trained(0.0, num_parts=1, num_missing_first=0)
    for _ in range(2):
        policy.missing(8, begins=True)
        assert decide(policy).action == "lend"
        policy.lends()
        policy.handed_over(0.0, num_awake=2)
        for left in reversed(range(2, 8)):
            clock.now_s += 1.1
            policy.sampled(100)
            policy.missing(left)
        policy.gave_back(0.0, late_s=0.0)
    # The mean rate of a whole step would count six groups in 6.6 s as a large gain.
    policy.missing(8, begins=True)
    assert decide(policy).action == "train"
    assert policy.reason == NO_GAIN


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["group", "time", "sampled", "step", "trained", "loaded", "idle"]),
        st.floats(0.0, 50.0),
    ),
    max_size=80,
)


@given(EVENTS, st.integers(1, 4), st.integers(0, 4), st.floats(1.0, 4.0))
def test_it_lends_only_for_a_predicted_gain(
    events: list[tuple[str, float]], own: int, borrowed: int, margin: float
) -> None:
    clock = Clock()
    policy = policy_of(clock, own=own, margin=margin)
    missing = 8
    policy.missing(missing, begins=True)
    for event, number in events:
        clock.now_s += number if event == "time" else 0.0
        if event == "group" and missing:
            missing -= 1
            policy.missing(missing)
        elif event == "step":
            missing = 8
            policy.missing(missing, begins=True)
        elif event == "trained":
            policy.trained(number, num_parts=4, num_missing_first=int(number) % 8)
        elif event == "loaded":
            policy.loaded(number)
        elif event == "sampled":
            policy.sampled(int(number))
        decision = decide(policy, is_idle=event != "idle", num_borrowed=borrowed)
        assert decision.after_s is None or decision.after_s >= TICK_S / 8
        if decision.action == "lend":
            assert not policy.is_lent
            assert borrowed
            assert missing
            own_s, wait_s = policy.own_s, policy.wait_s(borrowed)
            assert own_s is not None
            assert wait_s is not None
            assert own_s >= wait_s >= margin * policy.cost_s
            policy.lends()
            policy.handed_over(number, num_awake=borrowed)
        elif decision.action == "take_back":
            assert policy.is_lent
            policy.gave_back(number, late_s=0.0)
        elif decision.action == "hold":
            assert missing
        assert not (policy.is_lent and missing == 0 and decision.action == "hold")
