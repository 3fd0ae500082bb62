"""Parts of an optimizer step: complete, bounded, independent of timing."""

from hypothesis import given
from hypothesis import strategies as st

from rlsys.dataflow.scheduling.batching import ReadyGroup, StepAssembler, mini_batches, split
from rlsys.dataflow.scheduling.microbatch_plan import GroupLengths


def group(group_id: int, num_tokens: int) -> ReadyGroup:
    lengths = GroupLengths(prompt=0, completions=[num_tokens])
    return ReadyGroup(group_id=group_id, row_ids=(group_id,), lengths=lengths)


def drain(assembler: StepAssembler) -> list[list[list[int]]]:
    parts = []
    while (part := assembler.next_part()) is not None:
        shares = split(part, assembler.num_ranks)
        parts.append([[g.group_id for g in share] for share in shares])
    return parts


def test_streaming_hands_out_full_passes_before_the_step_is_complete() -> None:
    assembler = StepAssembler(groups_per_step=4, num_ranks=1, micro_batch_tokens=10, stream=True)
    assembler.add([group(0, 5)])
    assert drain(assembler) == []
    assembler.add([group(1, 4), group(2, 3)])
    assert drain(assembler) == [[[0, 1]]]  # group 2 does not fit beside them
    assembler.add([group(3, 3)])
    assert drain(assembler) == [[[2, 3]]]
    assert assembler.is_finished


def test_without_streaming_the_whole_step_is_one_part() -> None:
    assembler = StepAssembler(groups_per_step=3, num_ranks=2, micro_batch_tokens=4, stream=False)
    assembler.add([group(0, 5), group(1, 3)])
    assert drain(assembler) == []
    assembler.add([group(2, 2)])
    assert sorted(map(sorted, drain(assembler)[0])) == [[0], [1, 2]]


def test_a_group_longer_than_a_pass_still_goes() -> None:
    assembler = StepAssembler(groups_per_step=2, num_ranks=1, micro_batch_tokens=4, stream=True)
    assembler.add([group(0, 9)])
    assert drain(assembler) == [[[0]]]


def test_a_pipeline_gets_a_quarter_of_the_step_at_a_time() -> None:
    assembler = StepAssembler(
        groups_per_step=8, num_ranks=1, num_stages=2, micro_batch_tokens=1, stream=True
    )
    assembler.add([group(0, 5)])
    assert drain(assembler) == []
    assembler.add([group(number, 5) for number in (1, 2)])
    assert drain(assembler) == [[[0, 1]]]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    num_ranks=st.integers(1, 4),
    stream=st.booleans(),
    arrivals=st.lists(st.integers(1, 5), min_size=20, max_size=20),
)
def test_every_group_once_and_the_same_parts_whatever_the_arrivals(
    sizes: list[int], num_ranks: int, stream: bool, arrivals: list[int]
) -> None:
    def parts(chunks: list[int]) -> list[list[list[int]]]:
        assembler = StepAssembler(
            groups_per_step=len(sizes), num_ranks=num_ranks, micro_batch_tokens=16, stream=stream
        )
        groups = [group(i, size) for i, size in enumerate(sizes)]
        result = []
        for chunk in chunks:
            assembler.add(groups[:chunk])
            groups = groups[chunk:]
            result += drain(assembler)
        assert assembler.is_finished
        return result

    one_by_one = parts([1] * len(sizes))
    assert parts(arrivals) == one_by_one == parts([len(sizes)])
    trained = [group_id for part in one_by_one for share in part for group_id in share]
    assert sorted(trained) == list(range(len(sizes)))


@given(
    num_groups=st.integers(1, 20),
    num_minibatches=st.integers(1, 4),
    num_epochs=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_mini_batches_have_each_group_once_in_every_epoch(
    num_groups: int, num_minibatches: int, num_epochs: int, seed: int
) -> None:
    groups = [group(i, 1) for i in range(num_groups)]
    updates = mini_batches(
        groups, num_minibatches=num_minibatches, num_epochs=num_epochs, seed=seed
    )
    assert len(updates) == num_minibatches * num_epochs
    for epoch in range(num_epochs):
        parts = updates[epoch * num_minibatches : (epoch + 1) * num_minibatches]
        assert sorted(g.group_id for part in parts for g in part) == list(range(num_groups))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if num_minibatches == 1:
        assert updates[0] == groups
