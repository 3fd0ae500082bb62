"""The gate against the published inequality, by hand and for random histories.

Mutation shown: replacing `+ 1` in AdmissionGate.num_open by `+ 2` admits a batch too many, and
`test_no_history_breaks_the_staleness_bound` fails with staleness η + 1.
"""

import random

from hypothesis import given
from hypothesis import strategies as st

from rlsys.dataflow.scheduling.admission import AdmissionGate
from tests.errors import invalid


def test_on_policy_issues_one_batch_per_version() -> None:
    gate = AdmissionGate(groups_per_step=4, max_staleness=0, num_steps=3)
    assert gate.num_open == 4
    gate.issue(4)
    assert gate.num_open == 0
    gate.samplers_at(1)
    assert gate.num_open == 4


def test_staleness_one_runs_one_batch_ahead_and_stops_at_the_last_step() -> None:
    gate = AdmissionGate(groups_per_step=4, max_staleness=1, num_steps=3)
    assert gate.num_open == 8
    gate.issue(8)
    gate.samplers_at(1)
    assert gate.num_open == 4
    gate.issue(4)
    gate.samplers_at(2)
    assert gate.num_open == 0  # 12 groups are all that three steps train


def test_a_dropped_group_frees_its_place() -> None:
    gate = AdmissionGate(groups_per_step=2, max_staleness=0, num_steps=1)
    gate.issue(2)
    gate.release()
    assert gate.num_open == 1


def test_nothing_is_issued_that_could_only_be_trained_too_late() -> None:
    """On-policy with over-issue: surplus groups are dropped before the samplers have new weights.

    New groups would be as stale as the dropped ones.
    """
    gate = AdmissionGate(groups_per_step=4, max_staleness=0, num_steps=3, over_issue=2)
    gate.issue(6)
    gate.trainer_at(1)
    gate.release(2)
    assert gate.num_open == 0
    gate.samplers_at(1)
    assert gate.num_open == 6  # 4 trained hold their places; the bound is 8, and 2 more


def test_a_restored_history_issues_again_what_was_open_only_as_far_as_the_bound_goes() -> None:
    gate = AdmissionGate(groups_per_step=4, max_staleness=1, num_steps=9)
    gate.restore(num_trained=8, version=2)
    assert gate.num_open == 8  # steps 3 and 4, however many groups the crash left open


def test_a_history_that_was_rolled_back_waits_for_its_weights() -> None:
    gate = AdmissionGate(groups_per_step=4, max_staleness=1, num_steps=9)
    gate.issue(8)
    gate.trainer_at(1)
    gate.samplers_at(1)
    gate.restore(num_trained=0, version=0, wait_for_samplers=True)
    assert gate.num_open == 0
    gate.samplers_at(0)
    assert gate.num_open == 8


def test_negative_bound_is_refused() -> None:
    with invalid("max_staleness", -1):
        AdmissionGate(groups_per_step=2, max_staleness=-1, num_steps=1)


@given(
    seed=st.integers(0, 2**32),
    groups_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
)
def test_no_history_breaks_the_staleness_bound(
    seed: int, groups_per_step: int, max_staleness: int
) -> None:
    """The worst case: the oldest version samples, samplers load late, groups drop at random.

    The trainer takes groups in the order of issue.
    """
    rng = random.Random(seed)
    num_steps = 6
    gate = AdmissionGate(
        groups_per_step=groups_per_step, max_staleness=max_staleness, num_steps=num_steps
    )
    queue: list[int] = []  # the version that sampled each open group
    trainer_version = sampler_version = 0
    while trainer_version < num_steps:
        moves = []
        if gate.num_open:
            moves.append("issue")
        if queue:
            moves.append("drop")
        if sampler_version < trainer_version:
            moves.append("load")
        if len(queue) >= groups_per_step:
            moves.append("train")
        assert moves, "deadlock"
        match rng.choice(moves):
            case "issue":
                gate.issue()
                queue.append(sampler_version)
            case "drop":
                if rng.random() < 0.3:
                    queue.pop(rng.randrange(len(queue)))
                    gate.release()
            case "load":
                sampler_version += 1
                gate.samplers_at(sampler_version)
            case "train":
                batch, queue = queue[:groups_per_step], queue[groups_per_step:]
                assert trainer_version - min(batch) <= max_staleness
                trainer_version += 1
                gate.trainer_at(trainer_version)
