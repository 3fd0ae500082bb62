"""Prompts that come with rollouts of other runs: selection, encoding, persistence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.arithmetic import correct
from rlsys.config import DataConfig, ObserveConfig, RunConfig, SamplingConfig
from rlsys.data.prompts import PromptSource
from rlsys.data.swarm.external_log import ExternalLog, check_issued, read_external
from rlsys.data.swarm.external_prompts import (
    WARN_AFTER_STEPS,
    Encoder,
    ExternalPrompts,
    external_prompts,
)
from rlsys.data.swarm.shared_pool import Shared, SharedCompletion, SharedGroup
from rlsys.errors import MAX_VALUE, NOT_GIVEN, InvalidValue
from rlsys.launcher.tiny_models import CHAT_TEMPLATE, build_tokenizer
from rlsys.rewards.answer_match import exact_match
from rlsys.types import FinishReason, Prompt
from tests.data.test_peers import records, written
from tests.errors import invalid
from tests.tiers import examples

DIGITS = build_tokenizer("0123456789+=")
BYTES = build_tokenizer()
ROWS = [{"prompt": f"{n}+0=", "answer": str(n)} for n in range(100)]


def source(tokenizer: Any = DIGITS, **config: Any) -> PromptSource:
    return PromptSource(
        DataConfig(**config),
        tokenizer,
        seed=0,
        max_tokens=6,
        max_context=64,
        rows=ROWS,
    )


def encoder(tokenizer: Any = DIGITS, *, stop: tuple[str, ...] = (), **config: Any) -> Encoder:
    own = source(tokenizer, **config)
    return Encoder(own, tokenizer, max_tokens=6, stop=stop, rewards=[exact_match("answer")])


def group(number: int = 1, *texts: str, truncated: bool = False, **changes: Any) -> SharedGroup:
    fields = {"asked": "2+2=", "row": {"answer": "4"}, **changes}
    completions = [SharedCompletion(text=text, truncated=truncated) for text in texts or "45"]
    return SharedGroup(peer="a", group_id=number, completions=completions, rewards=[1, 0], **fields)


def test_another_runs_group_is_read_with_this_runs_tokens() -> None:
    prompt = encoder()(3, group())
    assert (prompt.index, prompt.text, prompt.shared_by) == (3, "2+2=", "a")
    assert prompt.row == -1
    assert prompt.token_ids == tuple(DIGITS("2+2=")["input_ids"])
    assert prompt.metadata == {"answer": "4"}
    four = DIGITS("4", add_special_tokens=False)["input_ids"]
    first, second = prompt.completions
    assert first.token_ids == (*four, DIGITS.eos_token_id)
    assert (first.text, second.text) == ("4", "5")
    assert first.finish_reason is FinishReason.STOP

    (cut,) = encoder()(3, group(1, "4", truncated=True)).completions
    assert cut.token_ids == tuple(four)
    assert cut.finish_reason is FinishReason.LENGTH
    (stopped,) = encoder(stop=("=",))(3, group(1, "4=")).completions
    assert DIGITS.eos_token_id not in stopped.token_ids


def test_a_prompt_is_rendered_by_this_runs_template() -> None:
    chatty = build_tokenizer()
    chatty.chat_template = CHAT_TEMPLATE
    prompt = encoder(chatty, chat_template=True)(0, group())
    assert prompt.asked == "2+2="
    assert prompt.text != "2+2="
    assert "2+2=" in prompt.text


@pytest.mark.parametrize(
    ("bad", "field", "value"),
    [
        (group(1, "4444444"), "", NOT_GIVEN),
        (group(1, "", truncated=True), "", NOT_GIVEN),
        (group(row={}), ": answer", None),
        (group(row={"answer": None}), ": answer", None),
        (group(row={"answer": ["4"]}), ": answer", ["4"]),
        (group(asked="1+" * 99), "", "1+" * 99),
        (group(asked=[{"role": "user", "content": "2+2="}]), "", NOT_GIVEN),
        (group(asked=None), "", None),
        (group(asked=7), "", 7),
    ],
)
def test_a_group_that_this_run_cannot_read_is_refused(
    bad: SharedGroup, field: str, value: Any
) -> None:
    with invalid(f"group 1 of a{field}", value):
        encoder()(0, bad)


@pytest.mark.parametrize("bad", [group(1, "four"), group(1, "\ud800"), group(asked="2 plus 2=")])
def test_a_group_with_unknown_characters_is_refused(bad: SharedGroup) -> None:
    with invalid("group 1 of a"):
        encoder()(0, bad)


class Peers:
    """Offers groups, some of which cannot be read."""

    def __init__(self, offers: list[str]) -> None:
        self.offers = offers
        self.num_taken = 0

    def take(self, index: int) -> SharedGroup | None:
        while self.offers:
            offer = self.offers.pop()
            if offer == "none":
                return None
            self.num_taken += 1
            return group(self.num_taken, *("45" if offer == "good" else "xy"))
        return None


def prompts_of(log: ExternalLog, peers: Peers, groups_per_step: int) -> ExternalPrompts:
    return ExternalPrompts(
        source(),
        groups_per_step=groups_per_step,
        prompts_per_step=4,
        take=peers.take,
        encode=encoder(),
        log=log,
    )


OFFERS = st.lists(st.sampled_from(["none", "good", "bad"]), max_size=30)


@settings(deadline=None, max_examples=examples(60))
@given(offers=OFFERS, later=OFFERS, groups_per_step=st.integers(0, 4), torn=st.integers(0, 30))
def test_decisions_are_kept_over_crashes(
    tmp_path_factory: pytest.TempPathFactory,
    offers: list[str],
    later: list[str],
    groups_per_step: int,
    torn: int,
) -> None:
    path = tmp_path_factory.mktemp("run") / "external.jsonl"
    log = ExternalLog(path)
    prompts = prompts_of(log, Peers(offers), groups_per_step)
    found = [prompts.at(index) for index in range(16)]
    assert [prompts.at(index) for index in range(16)] == found
    for step in range(4):
        of_step = found[4 * step : 4 * step + 4]
        assert sum(bool(prompt.shared_by) for prompt in of_step) <= groups_per_step
    for index, prompt in enumerate(found):
        assert prompts.row(index) == prompt.row
        assert bool(prompt.completions) == bool(prompt.shared_by)
        assert prompt.shared_by or prompt == source().at(index)

    # Killed while it writes another line. Later the peers offer other groups, or are gone.
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + (b'{"prompt": 99, "group": {"peer": "a"}}' * 2)[:torn])
    log = ExternalLog(path)
    assert path.read_bytes() == whole
    resumed = prompts_of(log, Peers(later), groups_per_step)
    assert [resumed.at(index) for index in range(16)] == found
    check_issued(path, shared(groups_per_step), 4, range(16))
    resumed.at(17), resumed.at(18)
    log.close()
    taken = [one.key for one in read_external(path).values() if one is not None]
    assert len(taken) >= sum(bool(prompt.shared_by) for prompt in found)


def test_a_step_has_exactly_groups_per_step_external_groups() -> None:
    class Endless(Peers):
        def take(self, index: int) -> SharedGroup | None:
            self.num_taken += 1
            return group(self.num_taken)

    class Forgetful(dict[int, Any]):
        def decide(self, index: int, group: Any) -> None:
            self[index] = group

    for number in range(5):
        prompts = prompts_of(Forgetful(), Endless([]), number)  # type: ignore[arg-type]
        external = [bool(prompts.at(index).shared_by) for index in range(12)]
        assert [sum(external[start : start + 4]) for start in range(9)] == [number] * 9


def test_a_run_warns_once_that_its_peers_offer_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = ExternalLog(tmp_path / "external.jsonl")
    offers = ["good"]
    prompts = prompts_of(log, Peers(offers), 2)
    for index in range(4 * WARN_AFTER_STEPS):
        prompts.at(index)
    assert caplog.messages == []
    for index in range(4 * WARN_AFTER_STEPS, 12 * WARN_AFTER_STEPS):
        prompts.at(index)
    (message,) = caplog.messages
    assert "20 steps" in message
    log.close()


def shared(groups_per_step: int) -> Shared:
    return Shared(peers=["*"], groups_per_step=groups_per_step)


def test_a_log_without_a_line_for_an_issued_prompt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "external.jsonl"
    for there in (False, True):
        with invalid(str(path)):
            check_issued(path, shared(2), 4, range(6))
        check_issued(path, shared(0), 4, range(6))
        assert path.exists() == there
        path.touch()


GROUP = {
    "peer": "a",
    "group_id": 1,
    "asked": "1+1",
    "row": {},
    "completions": [{"text": "2", "truncated": False}],
    "rewards": [1.0],
}


def line(index: object, group: object = None) -> bytes:
    return json.dumps({"prompt": index, "group": group}).encode() + b"\n"


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff\x00\xfe\n",
        b"[" * 100_000 + b"\n",
        b"[]\n",
        line("1"),
        line(True),
        line(1, 5),
        line(1, {**GROUP, "peer": 5}),
        line(1, {**GROUP, "more": 5}),
        line(1, {**GROUP, "row": [["a", 1]]}),
        line(1, {**GROUP, "completions": [{"text": 5, "truncated": False}]}),
        line(1, {**GROUP, "rewards": ["1.0"]}),
        line(1, {**GROUP, "row": {"a": json.loads("[" * 300 + "]" * 300)}}),
        line(1, {name: value for name, value in GROUP.items() if name != "asked"}),
    ],
)
def test_a_damaged_log_is_refused_and_not_changed(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "external.jsonl"
    path.write_bytes(line(0, GROUP) + bad)
    for read in (ExternalLog, read_external, lambda p: check_issued(p, shared(2), 4, [])):
        with invalid(str(path)) as found:
            read(path)
        assert "line 2" in found.value.rule
    assert path.read_bytes() == line(0, GROUP) + bad


def test_a_log_with_repeated_lines_is_refused_with_the_cut(
    tmp_path: Path,
) -> None:
    path = tmp_path / "external.jsonl"
    whole = line(1, GROUP) + line(3)
    path.write_bytes(whole * 2)
    for read in (ExternalLog, read_external, lambda p: check_issued(p, shared(2), 4, [])):
        with invalid(str(path)) as found:
            read(path)
        assert "line 3 repeats prompt 1" in found.value.rule
        assert f"truncate -s {len(whole)} {path}" in found.value.fix


def test_a_pipe_is_refused_instead_of_read(tmp_path: Path) -> None:
    path = tmp_path / "external.jsonl"
    os.mkfifo(path)
    for read in (ExternalLog, read_external, lambda p: check_issued(p, shared(2), 4, [])):
        with invalid(str(path)):
            read(path)


def test_a_message_is_short_for_a_long_text() -> None:
    for bad in (
        group(asked="1+" * 5_000),
        group(asked="1 " * 5_000),
        group(asked=["1"] * 5_000),
        group(asked={"1": "1" * 5_000}),
        group(1, "x" * 5_000),
        group(row={"answer": ["4"] * 5_000}),
    ):
        with pytest.raises(InvalidValue) as refused:
            encoder()(0, bad)
        assert refused.value.field.startswith("group 1 of a")
        assert len(str(refused.value)) < MAX_VALUE + 300


def test_rows_of_other_runs_are_checked_like_own_rows() -> None:
    for rewards in ([exact_match("answer")], [correct]):
        check = Encoder(source(), DIGITS, max_tokens=6, stop=(), rewards=rewards)
        for value in ({"a": [1]}, ["4"], True, None, float("nan")):
            with pytest.raises(InvalidValue) as found:
                check(0, group(row={"answer": value}))
            assert found.value.field == "group 1 of a: answer"
            own = PromptSource(
                DataConfig(),
                DIGITS,
                seed=0,
                max_tokens=6,
                max_context=64,
                rows=[{"prompt": "2+2=", "answer": value}],
            )
            with pytest.raises(InvalidValue) as found:
                own.check_rewards(rewards)
            assert "answer" in (found.value.value, found.value.field.rpartition(": ")[2])


def test_a_resumed_run_takes_no_group_twice(tmp_path: Path) -> None:
    written(tmp_path / "b", *(records(1, number) for number in range(3))).close()
    config = RunConfig(
        name="a",
        runs_dir=str(tmp_path),
        prompts_per_step=4,
        group_size=2,
        sampling=SamplingConfig(max_tokens=6),
        observe=ObserveConfig(record_groups=4),
    )

    def run(first: int) -> list[Prompt]:
        with external_prompts(
            source(BYTES),
            Shared(peers=["b"], groups_per_step=4),
            config=config,
            tokenizer=BYTES,
            rewards=[exact_match("answer")],
            path=tmp_path / "external.jsonl",
            run_id="a-id",
        ) as prompts:
            found: list[Prompt] = []
            index = first
            # The thread that reads peers needs some time.
            while not any(prompt.shared_by for prompt in found) and index < 10**5:
                found.append(prompts.at(index))
                index += 1
            found += [prompts.at(index + more) for more in range(3 - first)]
            return found

    before = [prompt for prompt in run(0) if prompt.shared_by]
    assert len(before) == 3
    decided = read_external(tmp_path / "external.jsonl")
    with ExternalLogOf(tmp_path) as log:
        assert sorted(log.keys) == sorted(one.key for one in decided.values() if one)
    written(tmp_path / "b", records(2, 3)).close()
    after = [prompt for prompt in run(len(decided)) if prompt.shared_by]
    assert [prompt.completions[0].text for prompt in after] == ["3.0"]


class ExternalLogOf:
    def __init__(self, directory: Path) -> None:
        self._log = ExternalLog(directory / "external.jsonl")

    def __enter__(self) -> ExternalLog:
        return self._log

    def __exit__(self, *_: object) -> None:
        self._log.close()
