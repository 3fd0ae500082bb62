"""Membership of links between ranks and importers: pure, under an injected clock."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlsys.config.rollout_config import WeightTransport
from rlsys.reallocation.transport.link_epochs import (
    MAX_FAILURES,
    RETRY_AFTER_S,
    Link,
    LinkEpochs,
    Verdict,
)
from tests.tiers import examples


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def epochs(transport: WeightTransport = "auto") -> tuple[LinkEpochs, Clock]:
    clock = Clock()
    return LinkEpochs(transport, clock), clock


def link(of: LinkEpochs, node: str = "b", importer: str = "rollout-0") -> Link:
    found = of.link(node, importer)
    assert found is not None
    return found


def test_a_link_lasts_until_its_importer_changes() -> None:
    known, _ = epochs()
    first = link(known)
    known.worked(first)
    assert link(known) == first
    second = link(known, importer="rollout-1")
    assert (first.number, second.number) == (1, 2)
    assert link(known, importer="rollout-0").number == 3  # numbers are not used again


def test_links_that_fail_repeatedly_are_replaced_by_objects_for_a_while() -> None:
    known, clock = epochs()
    verdicts = [known.failed(link(known)) for _ in range(MAX_FAILURES)]
    assert verdicts == [Verdict.RETRY] * (MAX_FAILURES - 1) + [Verdict.USE_OBJECTS]
    assert known.link("b", "rollout-0") is None
    clock.now = RETRY_AFTER_S - 1
    assert known.link("b", "rollout-0") is None
    clock.now = RETRY_AFTER_S
    assert link(known).number == MAX_FAILURES + 1


def test_a_new_importer_is_tried_at_once() -> None:
    known, _ = epochs()
    for _ in range(MAX_FAILURES):
        known.failed(link(known))
    assert known.link("b", "rollout-1") is not None


def test_success_forgives_failures() -> None:
    known, _ = epochs()
    for _ in range(3 * MAX_FAILURES):
        assert known.failed(link(known)) is Verdict.RETRY
        known.worked(link(known))


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_a_transport_that_was_asked_for_gives_up(transport: WeightTransport) -> None:
    known, _ = epochs(transport)
    assert link(known).kind == transport
    verdicts = [known.failed(link(known)) for _ in range(MAX_FAILURES)]
    assert verdicts[-1] is Verdict.GIVE_UP
    assert known.link("b", "rollout-0") is not None


def test_objects_use_no_links() -> None:
    known, _ = epochs("objects")
    assert known.link("b", "rollout-0") is None


def test_a_restarted_trainer_has_other_links() -> None:
    known, _ = epochs()
    before = link(known)
    known.trainer_restarted()
    after = link(known)
    assert before.name != after.name
    assert before.order < after.order


NODES = st.sampled_from("abc")
ENDS = st.sampled_from(["worked", "failed", "interrupted"])
IMPORTERS = st.sampled_from(["rollout-0", "rollout-1", "rollout-1.1"])


class Membership(RuleBasedStateMachine):
    """Any order of joins, deaths, failures and late reports."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.clock = epochs()
        self.current: dict[str, Link] = {}
        self.all: list[Link] = []

    @rule(node=NODES, importer=IMPORTERS)
    def join(self, node: str, importer: str) -> None:
        before = self.current.get(node)
        found = self.known.link(node, importer)
        if found is None:
            return
        assert (found.node, found.importer) == (node, importer)
        if before is not None and found != before:
            assert found.order > before.order
        if found not in self.all:
            assert found.name not in {one.name for one in self.all}
            self.all.append(found)
        self.current[node] = found

    @rule(node=NODES, ends=ENDS)
    def report(self, node: str, ends: str) -> None:
        if (link := self.current.get(node)) is None:
            return
        getattr(self.known, ends)(link)
        if ends != "worked":
            assert self.known.link(node, link.importer) != link
            del self.current[node]

    @rule(data=st.data(), ends=ENDS)
    def report_late(self, data: st.DataObject, ends: str) -> None:
        """The invariant shows that late reports have no effect."""
        if late := [one for one in self.all if one not in self.current.values()]:
            getattr(self.known, ends)(data.draw(st.sampled_from(late)))

    @rule()
    def restart(self) -> None:
        self.known.trainer_restarted()
        self.current = {}

    @rule(seconds=st.floats(0, 2 * RETRY_AFTER_S))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def current_links_last(self) -> None:
        for node, link in self.current.items():
            assert self.known.link(node, link.importer) == link


Membership.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
TestMembership = Membership.TestCase
