"""Each group ends exactly once, over crashes and resumes.

Mutation shown: without the `while` in Ledger.resume, groups trained after the checkpoint stay
trained although their weights are lost, and
`test_resume_opens_what_was_trained_after_the_checkpoint` fails.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlsys.dataflow.scheduling.ledger import Event, Ledger, LedgerError, LedgerFile, read_events
from tests.errors import error_about, invalid


def discard(event: dict[str, Any]) -> None:
    pass


def test_a_group_ends_once() -> None:
    ledger = Ledger(discard, groups_per_step=1)
    ledger.issue(0, prompt_index=0, version=0)
    ledger.train({0: 0}, step=1)
    with error_about(LedgerError, "group 0", "step 1"):
        ledger.drop(0, reason="stale")
    with error_about(LedgerError, "group 0", "step 1"):
        ledger.reissue(0, version=1)
    with error_about(LedgerError, "group 7"):
        ledger.train({7: 1}, step=2)
    with error_about(LedgerError, "group 0"):
        ledger.issue(0, prompt_index=0, version=0)


def test_a_prompt_is_issued_or_skipped_and_in_order() -> None:
    events: list[Event] = []
    ledger = Ledger(events.append, groups_per_step=2)
    ledger.issue(0, prompt_index=0, version=0)
    ledger.skip(reason="retired")
    assert (ledger.next_prompt, ledger.num_issued, ledger.num_skipped) == (2, 1, 1)
    with error_about(LedgerError, "group 1", "prompt 1", "prompt 2"):
        ledger.issue(1, prompt_index=1, version=0)
    ledger.issue(1, prompt_index=2, version=0)
    assert events[1] == {"event": "skipped", "prompt": 1, "reason": "retired"}
    with error_about(LedgerError, "prompt 2", "3"):
        Ledger.replay(
            [*events, {"event": "skipped", "prompt": 2, "reason": "retired"}],
            events.append,
            groups_per_step=2,
        )


def test_a_refused_event_is_not_recorded() -> None:
    events: list[dict[str, Any]] = []
    ledger = Ledger(events.append, groups_per_step=2)
    ledger.issue(0, prompt_index=0, version=0)
    with pytest.raises(LedgerError):
        ledger.train({0: 0, 1: 0}, step=1)
    assert [event["event"] for event in events] == ["issued"]
    assert ledger.num_trained == 0


@pytest.mark.parametrize(
    ("step", "oldest_versions", "names"),
    [
        (2, {0: 0, 1: 0}, ("step 2 ", "step 0")),
        (1, {0: 0}, ("step 1 ", "[0]", " 2 ")),
        (1, {0: 0, 1: 0, 2: 0}, ("step 1 ", "[0, 1, 2]", " 2 ")),
    ],
)
def test_steps_are_consecutive_and_whole(
    step: int, oldest_versions: dict[int, int], names: tuple[str, ...]
) -> None:
    ledger = Ledger(discard, groups_per_step=2)
    for group_id in range(3):
        ledger.issue(group_id, prompt_index=group_id, version=0)
    with error_about(LedgerError, *names):
        ledger.train(oldest_versions, step=step)
    assert len(ledger.open_groups) == 3


def test_a_step_that_was_never_trained_cannot_be_resumed_from() -> None:
    ledger = Ledger(discard, groups_per_step=1)
    ledger.issue(0, prompt_index=0, version=0)
    ledger.train({0: 0}, step=1)
    with error_about(LedgerError, "step 2: 1 "):
        ledger.resume(step=2)


def test_each_token_version_stands_beside_its_group() -> None:
    events: list[dict[str, Any]] = []
    ledger = Ledger(events.append, groups_per_step=2)
    ledger.issue(0, prompt_index=0, version=0)
    ledger.issue(1, prompt_index=1, version=0)
    ledger.reissue(0, version=1)
    assert [group.version for group in ledger.open_groups] == [1, 0]
    ledger.train({1: 0, 0: 1}, step=1)
    assert events[-1] == {
        "event": "trained",
        "step": 1,
        "groups": [0, 1],
        "oldest_versions": [1, 0],
    }


def test_resume_opens_what_was_trained_after_the_checkpoint() -> None:
    ledger = Ledger(discard, groups_per_step=1)
    for group_id in range(4):
        ledger.issue(group_id, prompt_index=group_id, version=0)
    ledger.train({0: 0}, step=1)
    ledger.train({1: 0}, step=2)
    ledger.drop(2, reason="reward failed")
    ledger.resume(step=1)
    assert [group.group_id for group in ledger.open_groups] == [1, 3]
    assert (ledger.num_trained, ledger.num_dropped, ledger.next_prompt) == (1, 1, 4)
    assert ledger.step == 1


def test_a_torn_last_line_is_cut_and_the_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    file = LedgerFile(path)
    ledger = Ledger(file, groups_per_step=1)
    ledger.issue(0, prompt_index=0, version=0)
    file.close()
    with path.open("a") as torn:
        torn.write('{"event": "trai')
    assert len(read_events(path)) == 1
    file = LedgerFile(path)
    ledger = Ledger.replay(read_events(path), file, groups_per_step=1)
    ledger.train({0: 0}, step=1)
    file.close()
    assert [event["event"] for event in read_events(path)] == ["issued", "trained"]


@pytest.mark.parametrize(
    "event",
    [
        {"event": "trained", "step": 1, "groups": [0]},  # as it was before versions were recorded
        {"event": "trained", "step": 1, "groups": [0], "oldest_versions": ["0"]},
        {"event": "dropped", "group": 0, "reason": None},
        {"event": "issued", "group": 1, "prompt": 1, "version": True},
        {"event": "lost", "group": 0},
        {"event": "dropped", "group": 0, "reason": "stale", "extra": 1},
        [],
        {"event": []},
    ],
)
def test_replay_names_the_event_that_is_none(event: Any) -> None:
    first = {"event": "issued", "group": 0, "prompt": 0, "version": 0}
    with error_about(LedgerError, "event 2: "):
        Ledger.replay([first, event], discard, groups_per_step=1)


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "issued"\n{"event": "resumed", "step": 0}\n')
    with invalid(f"{path} line 1"):
        read_events(path)


class LedgerHistory(RuleBasedStateMachine):
    """Random histories against a simple model: how each group ended, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.ledger = Ledger(self.events.append, groups_per_step=2)
        self.fate: dict[int, int | str | None] = {}
        self.step = 0

    def open_ids(self) -> list[int]:
        return [group_id for group_id, fate in self.fate.items() if fate is None]

    @rule()
    def issue(self) -> None:
        group_id = len(self.fate)
        self.ledger.issue(group_id, prompt_index=group_id, version=self.step)
        self.fate[group_id] = None

    @precondition(lambda self: len(self.open_ids()) >= 2)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        open_ids = st.sampled_from(self.open_ids())
        chosen = data.draw(st.lists(open_ids, min_size=2, max_size=2, unique=True))
        self.step += 1
        self.ledger.train(dict.fromkeys(chosen, self.step - 1), step=self.step)
        self.fate.update(dict.fromkeys(chosen, self.step))

    @precondition(lambda self: self.open_ids())
    @rule(data=st.data())
    def reissue(self, data: st.DataObject) -> None:
        self.ledger.reissue(data.draw(st.sampled_from(self.open_ids())), version=self.step)

    @precondition(lambda self: self.open_ids())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(self.open_ids()))
        self.ledger.drop(group_id, reason="stale")
        self.fate[group_id] = "stale"

    @rule(data=st.data())
    def crash_and_resume(self, data: st.DataObject) -> None:
        self.step = data.draw(st.integers(0, self.step))
        self.ledger = Ledger.replay(list(self.events), self.events.append, groups_per_step=2)
        self.ledger.resume(step=self.step)
        for group_id, fate in self.fate.items():
            if isinstance(fate, int) and fate > self.step:
                self.fate[group_id] = None

    @invariant()
    def every_group_stands_where_the_model_says(self) -> None:
        assert [group.group_id for group in self.ledger.open_groups] == self.open_ids()
        assert self.ledger.num_issued == len(self.fate)
        assert self.ledger.num_trained == 2 * self.step
        assert self.ledger.num_trained == sum(isinstance(f, int) for f in self.fate.values())
        assert self.ledger.num_dropped == sum(fate == "stale" for fate in self.fate.values())


TestLedgerHistory = LedgerHistory.TestCase
TestLedgerHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
