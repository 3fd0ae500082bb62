"""The commands of a model: each once, in order, whatever arrives when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.command_log import MAX_EARLY, CommandLog


def carried_out(log: CommandLog[int]) -> list[int]:
    """All whose turn comes now."""
    found = []
    while (command := log.next()) is not None:
        found.append(command)
        log.done()
    return found


def test_commands_that_come_early_wait_for_those_before_them() -> None:
    log: CommandLog[int] = CommandLog(first=1)
    assert log.add(3, b"c", 3)
    assert log.add(2, b"b", 2)
    assert carried_out(log) == []
    lacking = log.lacks
    assert log.add(1, b"a", 1)
    assert (lacking, log.lacks) == (1, None)
    assert carried_out(log) == [1, 2, 3]


def test_one_runs_at_a_time() -> None:
    log: CommandLog[int] = CommandLog()
    log.add(0, b"a", 0)
    log.add(1, b"b", 1)
    assert [log.next(), log.next()] == [0, None]
    log.done()
    assert log.next() == 1


def test_a_command_that_is_sent_again_is_carried_out_once() -> None:
    log: CommandLog[int] = CommandLog()
    assert log.add(0, b"a", 0)
    assert not log.add(0, b"a", 100)
    assert log.next() == 0
    assert not log.add(0, b"a", 100)  # while it runs
    log.done()
    assert not log.add(0, b"a", 100)  # and when it has ended
    assert log.next() is None


def test_a_number_is_of_one_command() -> None:
    log: CommandLog[int] = CommandLog()
    log.add(0, b"a", 0)
    with pytest.raises(ApiError, match="seq_id=0 was another command"):
        log.add(0, b"b", 1)
    with pytest.raises(ApiError, match="before the first"):
        log.add(-1, b"b", 1)


def test_what_waits_when_the_log_is_closed_is_told_in_order() -> None:
    log: CommandLog[int] = CommandLog()
    log.add(2, b"c", 2)
    log.add(1, b"b", 1)
    assert log.close("the trainer has died.") == [1, 2]
    with pytest.raises(ApiError, match=r"the trainer has died\."):
        log.add(0, b"a", 0)


def test_too_many_that_wait_are_refused_but_the_one_they_wait_for_is_not() -> None:
    log: CommandLog[int] = CommandLog()
    for seq_id in range(1, MAX_EARLY + 1):
        log.add(seq_id, b"", seq_id)
    with pytest.raises(ApiError, match="seq_id=0, which has not") as refused:
        log.add(MAX_EARLY + 1, b"", 0)
    assert refused.value.status == 429
    assert log.add(0, b"", 0)
    assert carried_out(log) == list(range(MAX_EARLY + 1))


@given(st.data())
def test_any_order_and_any_number_of_retries_give_each_once_in_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30))
    order = data.draw(st.permutations(range(count)))
    repeats = data.draw(st.lists(st.integers(0, count - 1), max_size=40))
    arrivals = list(order)
    for number in repeats:
        arrivals.insert(data.draw(st.integers(0, len(arrivals))), number)
    log: CommandLog[int] = CommandLog()
    done: list[int] = []
    sent: set[int] = set()
    for seq_id in arrivals:
        is_new = log.add(seq_id, seq_id.to_bytes(2), seq_id)
        assert is_new == (seq_id not in sent)
        sent.add(seq_id)
        if data.draw(st.booleans()):
            done += carried_out(log)
            missing = next(number for number in range(count + 1) if number not in sent)
            assert done == list(range(missing))
    done += carried_out(log)
    assert done == list(range(count))
