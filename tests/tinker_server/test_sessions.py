"""Silent sessions, with a fake clock."""

from __future__ import annotations

from rlsys.tinker_server.sessions import HEARTBEAT_S, SILENT_S, Sessions
from tests.tinker_server.clocks import Clock


def test_a_session_is_silent_after_three_missed_heartbeats() -> None:
    clock = Clock()
    sessions = Sessions(clock, timeout_s=600)
    first, second = sessions.create({}).name, sessions.create({}).name
    both = {first, second}
    clock.now += 3 * HEARTBEAT_S - 1
    assert sessions.silent(both) == []
    sessions.seen(second)
    clock.now += 1
    assert [one.name for one in sessions.silent(both)] == [first]
    clock.now += 60
    assert [one.name for one in sessions.silent(both)] == [first, second]
    assert [one.name for one in sessions.silent({second})] == [second]
    sessions.seen(first)
    assert [one.name for one in sessions.silent(both)] == [second]


def test_sessions_that_were_seen_since_are_alive() -> None:
    clock = Clock()
    sessions = Sessions(clock, timeout_s=600)
    first, second = sessions.create({}).name, sessions.create({}).name
    both = {first, second}
    clock.now += 4
    sessions.seen(second)
    clock.now += 1
    since = clock.now
    assert sessions.silence_in_s(both, since) == SILENT_S - 5
    clock.now += 2
    sessions.seen(first)
    assert sessions.silence_in_s(both, since) == SILENT_S - 3
    sessions.seen(second)
    assert sessions.silence_in_s(both, since) is None


def test_reading_about_a_session_is_no_sign_of_life() -> None:
    clock = Clock()
    sessions = Sessions(clock, timeout_s=600)
    name = sessions.create({"a": "1"}, "run").name
    clock.now += 599
    assert (sessions.get(name).display_name, sessions.idle_s(name)) == ("run", 599)
    clock.now += 2
    assert [one.name for one in sessions.expired()] == [name]
