"""Commands of a model run once, in order, in whatever order they arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlsys.tinker_server.command_log import MAX_EARLY, CommandLog
from tests.tinker_server.refusals import refused


def carried_out(log: CommandLog[int]) -> list[int]:
    """Run and return the commands that can run now."""
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
    missing = log.missing_seq
    assert log.add(1, b"a", 1)
    assert (missing, log.missing_seq) == (1, None)
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
    with refused("seq_id", 0):
        log.add(0, b"b", 1)
    with refused("seq_id", -1):
        log.add(-1, b"b", 1)


def test_closing_the_log_returns_waiting_commands_in_order() -> None:
    log: CommandLog[int] = CommandLog()
    log.add(2, b"c", 2)
    log.add(1, b"b", 1)
    assert log.close("the trainer has died.") == [1, 2]
    with refused("seq_id", 0, status=410) as error:
        log.add(0, b"a", 0)
    assert error.value.rule == "the trainer has died"


def test_too_many_that_wait_are_refused_but_the_one_they_wait_for_is_not() -> None:
    log: CommandLog[int] = CommandLog()
    for seq_id in range(1, MAX_EARLY + 1):
        log.add(seq_id, b"", seq_id)
    with refused("seq_id", MAX_EARLY + 1, status=429) as error:
        log.add(MAX_EARLY + 1, b"", 0)
    assert "seq_id=0" in error.value.fix
    assert log.add(0, b"", 0)
    assert carried_out(log) == list(range(MAX_EARLY + 1))


def test_sizes_count_while_their_commands_wait() -> None:
    log: CommandLog[str] = CommandLog()
    log.add(1, b"b", "b", size=5)
    assert not log.is_awaited(1)
    assert log.is_awaited(0)
    log.add(0, b"a", "a", size=3)
    assert log.waiting_size == 8
    assert log.next() == "a"
    assert log.waiting_size == 5
    assert log.is_awaited(1)
    log.add(2, b"c", "c", size=7)
    log.remove(2)
    assert log.waiting_size == 5
    assert log.close("it ended") == ["b"]
    assert log.waiting_size == 0


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
