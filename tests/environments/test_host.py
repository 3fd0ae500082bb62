"""Rewards, ends and failures of episodes."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import rlsys
from rlsys.common.call_clock import waiting
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.environments.episode_host import Ended, EpisodeHost
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tools.tool_call import RawCall, ToolCall
from rlsys.environments.tools.tool_formats import ToolFormat
from rlsys.environments.tools.tools import ToolSet
from rlsys.environments.turn_columns import seats_of, turns_of
from rlsys.types import MAX_BRANCHES
from tests.environments.playing import LIMITS, InThreads, Scripted, hosted, played, request
from tests.environments.templates import CHATML, tokenizer


def play(environment: Any, says: Any, task: Any = None, **named: Any) -> Ended:
    async def run() -> Ended:
        host, _ = hosted(environment, says, **named)
        (ended,) = await played(host, [request(task=task)])
        await host.close()
        return ended

    return run_in_virtual_time(run())


@rlsys.environment(max_turns=4)
async def guess(chat: Any, task: Any) -> float:
    number = await chat("?", parse=int)
    while number != task["number"] and not chat.done:
        chat.reward(-0.25)
        number = await chat("<" if number > task["number"] else ">", parse=int)
    return float(number == task["number"])


def test_an_episode_is_its_turns_and_their_rewards() -> None:
    replies = iter(["32", "16", "8"])
    ended = play(guess, lambda text: next(replies), {"number": 8})
    assert ended.played is not None
    assert ended.failure is None
    assert ended.played.total == 0.5
    assert ended.played.components == {"turns": -0.5, "final": 1.0}
    trajectory = ended.played.trajectory
    digit = 3  # tokens 0 to 2 are <pad>, <bos>, <eos>
    question, less = 13, 14
    assert trajectory.prompt_token_ids.tolist() == [question]
    assert trajectory.token_ids.tolist() == [
        *(digit + 3, digit + 2, 2),
        *(less, digit + 1, digit + 6, 2),
        *(less, digit + 8, 2),
    ]
    assert trajectory.policy_versions.tolist() == [7, 7, 7, -1, 7, 7, 7, -1, 7, 7]
    assert trajectory.turn_rewards.tolist() == [0, 0, -0.25, 0, 0, 0, -0.25, 0, 0, 1]
    assert trajectory.branches.tolist() == [10, -1, 1, 0]


def test_a_reply_that_parse_rejects_gets_the_format_reward() -> None:
    graded = rlsys.environment(max_turns=4, format_reward=-2.0)(guess.function)
    ended = play(graded, lambda text: "<>", {"number": 8})
    assert ended.played is not None
    assert ended.played.components == {"final": -2.0}


def test_turns_are_bounded() -> None:
    asked: list[str] = []

    def one_more(text: str) -> str:
        asked.append(text)
        return "9"

    ended = play(guess, one_more, {"number": 8})
    assert len(asked) == 4
    assert ended.played is not None
    assert ended.played.components == {"turns": -0.75, "final": 0.0}


def test_an_environment_that_goes_on_after_the_context_is_full_is_truncated() -> None:
    truncated: list[bool] = []

    @rlsys.environment(format_reward=-1.0)
    async def endless(chat: Any, task: Any) -> float:
        try:
            while True:
                await chat("1")
        finally:
            truncated.append(chat.truncated)

    limits = EpisodeLimits(max_prompt_tokens=16, max_tokens=11, max_context=80)
    ended = play(endless, lambda text: "55", limits=limits)
    assert truncated == [True]
    assert ended.played is not None
    assert ended.played.finish_reason == "length"
    # 55<eos> 1 55<eos> 1 55<eos> is all that fits; nothing stands behind the last reply.
    assert len(ended.played.trajectory.token_ids) == 11
    assert ended.played.components == {"final": -1.0}


def test_a_reply_that_fills_the_context_is_truncated() -> None:
    @rlsys.environment
    async def once(chat: Any, task: Any) -> float:
        await chat("1")
        assert chat.done
        return 1.0

    limits = EpisodeLimits(max_prompt_tokens=16, max_tokens=3, max_context=80)
    ended = play(once, lambda text: "55555", limits=limits)
    assert ended.played is not None
    assert ended.played.finish_reason == "length"
    assert ended.played.total == 1.0  # the environment says what that is worth


HUGE = "12345678 " * 1_200_000  # about 10 MB


def test_a_huge_first_text_fails_without_being_encoded() -> None:
    @rlsys.environment
    async def tells_all(chat: Any, task: Any) -> float:
        await chat(HUGE.replace(" ", "9"))
        return 1.0

    async def run() -> tuple[Ended, int]:
        host, sampler = hosted(tells_all, lambda text: "5")
        (ended,) = await played(host, [request()])
        await host.close()
        return ended, sampler.codec.num_encoded

    ended, num_encoded = run_in_virtual_time(run())
    assert ended.failure is not None
    assert "10,800,000 characters" in ended.failure.message
    assert "data.max_prompt_tokens=16" in ended.failure.message
    assert num_encoded < 10_000


def test_a_huge_later_text_ends_the_episode_as_truncated() -> None:
    @rlsys.environment(format_reward=-1.0)
    async def tells_all(chat: Any, task: Any) -> float:
        await chat("1")
        await chat(HUGE.replace(" ", "9"))
        return 1.0

    async def run() -> tuple[Ended, int]:
        host, sampler = hosted(tells_all, lambda text: "5")
        (ended,) = await played(host, [request()])
        await host.close()
        return ended, sampler.codec.num_encoded

    ended, num_encoded = run_in_virtual_time(run())
    assert ended.played is not None
    assert ended.played.finish_reason == "length"
    assert ended.played.total == -1.0
    reason = ended.played.transcript[-1]["text"]
    assert "10,800,000 characters" in reason
    assert "80 tokens" in reason
    assert num_encoded < 10_000


def test_episodes_that_wait_for_their_group_end_when_the_group_is_aborted() -> None:
    """One episode fails; the next one ends before the group is aborted."""

    @rlsys.environment(num_retries=0, group_reward=lambda group: [0.0] * len(group))
    async def one_fails(chat: Any, task: Any) -> float:
        await chat("1")
        if task["fails"]:
            raise RuntimeError("no")
        return 1.0

    async def run() -> list[Ended]:
        host, _ = hosted(one_fails, lambda text: "5")
        ended = await played(host, [request(0, group_size=2, task={"fails": True})])
        host.submit([request(1, group_size=2, task={"fails": False})])
        await asyncio.sleep(1)
        assert not host.num_running
        host.abort(["0.0.0", "0.1.0"])
        ended += await host.collect()
        await host.close()
        return ended

    fails, held = run_in_virtual_time(run())
    assert fails.failure is not None
    assert held.request.request_id == "0.1.0"


@pytest.mark.parametrize("returned", [None, float("nan"), "1", {"a": "b"}, {}])
def test_a_result_that_is_not_a_reward_fails(returned: Any) -> None:
    @rlsys.environment
    async def odd(chat: Any, task: Any) -> Any:
        await chat("1")
        return returned

    ended = play(odd, lambda text: "5")
    assert ended.played is None
    assert ended.failure is not None
    assert (ended.failure.kind, ended.failure.reward) == ("type", "odd")


@rlsys.environment
async def folds(chat: Any, task: Any) -> float:
    """The opponent folds in every other game, before the policy's first turn."""
    if task["n"] % 2:
        return 2.0
    await chat("?")
    return -1.0


def test_an_episode_without_a_reply_of_the_policy_has_a_reward_and_no_token() -> None:
    ended = play(folds, lambda text: "5", task={"n": 1})
    assert ended.failure is None
    assert ended.played is not None
    assert ended.played.total == 2.0
    assert ended.played.components == {"final": 2.0}
    assert not ended.played.transcript
    trajectory = ended.played.trajectory
    assert trajectory.prompt_token_ids.tolist() == [2]  # the end of a text
    for column in ("token_ids", "sampler_logprobs", "policy_versions", "turn_rewards"):
        assert getattr(trajectory, column).tolist() == []
    assert trajectory.num_branches == 1
    assert turns_of(trajectory).tolist() == seats_of(trajectory).tolist() == []


def test_a_group_reward_counts_for_an_episode_without_a_reply() -> None:
    def double(rollouts: Any) -> list[float]:
        assert [len(one.token_ids) for one in rollouts] == [2, 0]
        return [10.0, 20.0]

    environment = rlsys.environment(group_reward=double)(folds.function)

    async def run() -> list[Ended]:
        host, _ = hosted(environment, lambda text: "5")
        return await played(host, [request(n, group_size=2, task={"n": n}) for n in range(2)])

    first, second = run_in_virtual_time(run())
    assert first.played is not None, first.failure
    assert second.played is not None, second.failure
    assert (first.played.total, second.played.total) == (9.0, 22.0)
    assert second.played.trajectory.turn_rewards.tolist() == []


def test_a_first_text_that_is_too_long_fails() -> None:
    @rlsys.environment
    async def long(chat: Any, task: Any) -> float:
        await chat("1" * 17)
        return 1.0

    ended = play(long, lambda text: "5")
    assert ended.failure is not None
    assert "17 tokens" in ended.failure.message
    assert "data.max_prompt_tokens=16" in ended.failure.message


def test_an_error_is_retried_and_then_fails() -> None:
    attempts: list[int] = []

    @rlsys.environment(num_retries=2)
    async def broken(chat: Any, task: Any) -> float:
        await chat("1")
        attempts.append(1)
        raise OSError("no server")

    ended = play(broken, lambda text: "5")
    assert len(attempts) == 3
    assert ended.played is None
    assert ended.failure is not None
    assert ended.failure.kind == "exception"
    assert "no server" in ended.failure.message


def test_attempts_do_not_share_changes_of_the_task() -> None:
    task = {"left": [1, 2, 3]}

    @rlsys.environment(num_retries=1)
    async def takes(chat: Any, task: Any) -> float:
        await chat("1")
        task["left"].pop()
        if len(attempts := [*attempted, len(task["left"])]) == 1:
            attempted[:] = attempts
            raise OSError("no server")
        return float(len(task["left"]))

    attempted: list[int] = []
    ended = play(takes, lambda text: "5", task)
    assert ended.played is not None
    assert ended.played.total == 2.0
    assert task == {"left": [1, 2, 3]}


def test_a_transcript_ends_with_why_the_function_did_not() -> None:
    @rlsys.environment(max_turns=1)
    async def goes_on(chat: Any, task: Any) -> float:
        while True:
            await chat("1", parse=task["parse"])

    refused = play(goes_on, lambda text: "5", {"parse": {}.__getitem__})
    assert refused.played is not None
    last = dict(refused.played.transcript[-1])
    assert "KeyError: '5'" in last.pop("text")
    assert last == {"branch": 0, "role": "ended", "sampled": False}
    over = play(goes_on, lambda text: "5", {"parse": int})
    assert over.played is not None
    assert over.played.transcript[-1]["role"] == "ended"
    assert "chat.done" in over.played.transcript[-1]["text"]


def test_a_missing_await_is_reported_with_its_fix_and_the_users_line() -> None:
    @rlsys.environment(num_retries=0)
    async def forgets(chat: Any, task: Any) -> float:
        return float(chat("1") < 3)

    @rlsys.environment(num_retries=0)
    async def says_a_number(chat: Any, task: Any) -> float:
        return float(await chat(1))

    with pytest.warns(RuntimeWarning, match="never awaited"):
        ended = play(forgets, lambda text: "5")
    assert ended.failure is not None
    assert "`await chat(...)`" in ended.failure.message
    assert 'float(chat("1") < 3)' in ended.failure.message
    assert "user_functions.py" not in ended.failure.message
    ended = play(says_a_number, lambda text: "5")
    assert ended.failure is not None
    assert "float(await chat(1))" in ended.failure.message
    assert ended.failure.what == "environment"


def test_the_exception_of_an_aborted_episode_is_not_logged(caplog: Any) -> None:

    @rlsys.environment
    async def raises(chat: Any, task: Any) -> float:
        try:
            return float(await chat("1"))
        finally:
            raise OSError("no server")

    async def run() -> None:
        host, _ = hosted(raises, lambda text: "5", delay_s=1.0)
        host.submit([request()])
        await asyncio.sleep(0.5)
        host.abort([request().request_id])
        (ended,) = await host.collect()
        assert ended.failure is None
        await host.close()
        gc.collect()

    run_in_virtual_time(run())
    assert "no server" not in caplog.text


def test_tools_that_no_template_renders_are_called_in_the_named_format() -> None:
    """The environment describes the tools in its messages."""

    @rlsys.tool
    def double(n: int) -> int:
        """Doubles."""
        return 2 * n

    @rlsys.environment(tools=[double], tool_format="json")
    async def doubles(chat: Any, task: Any) -> float:
        return float(await chat.until_answer("Call double."))

    def says(text: str) -> str:
        asked = '{"name": "double", "arguments": {"n": 4}}'
        return "8" if "tool\n8" in text else asked

    async def run() -> Ended:
        codec = Codec(tokenizer(), chat_template=CHATML)
        assert not codec.renders_tools
        limits = EpisodeLimits(max_prompt_tokens=200, max_tokens=400, max_context=600)
        host = EpisodeHost(
            doubles,
            codec,
            Scripted(codec, says),
            limits=limits,
            executor=InThreads(),
            template=CHATML,
        )
        (ended,) = await played(host, [request()])
        await host.close()
        return ended

    ended = asyncio.run(run())
    assert ended.played is not None, ended.failure
    assert ended.played.total == 8.0
    assert [line["role"] for line in ended.played.transcript] == [
        *("user", "assistant", "tool", "assistant")
    ]


@rlsys.tool
def lookup(key: str) -> str:
    """Return the value of the only key."""
    if key != "1":
        raise rlsys.ToolError(key)
    return "7"


def calls_of(text: str, tools: Any) -> Any:
    """`<1>` calls lookup, `<1` another tool, `+` has no arguments."""
    if text.startswith("<"):
        yield RawCall("lookup" if text.endswith(">") else "other", {"key": text[1:].rstrip(">")})
    elif text == "+":
        yield RawCall("lookup", {})
    else:
        yield text


@rlsys.environment(
    tools=[lookup],
    tool_format=ToolFormat("brackets", calls_of),
    format_reward=-1.0,
    plain_text=True,
)
async def asks(chat: Any, task: Any) -> float:
    return float(await chat.until_answer("?") == "5")


@pytest.mark.parametrize(
    ("replies", "reward", "tool_texts"),
    [
        (["<1>", "5"], 1.0, ["7"]),
        (["<->", "5"], 1.0, ["-"]),  # a ToolError, as written
        (["<1"], -1.0, []),  # no such tool: the policy has no tokens for the words of the error
        (["+"], -1.0, []),  # wrong arguments
    ],
)
def test_a_wrong_call_of_a_model_of_few_characters_does_not_fail_the_episode(
    replies: list[str], reward: float, tool_texts: list[str]
) -> None:
    left = iter(replies)
    ended = play(asks, lambda text: next(left))
    assert ended.played is not None, ended.failure
    assert ended.played.total == reward
    lines = ended.played.transcript
    assert [line["text"] for line in lines if line["role"] == "tool"] == tool_texts
    assert (lines[-1]["role"] == "ended") == (reward < 0)


def test_a_model_with_the_characters_gets_the_error_of_a_wrong_call() -> None:
    left = iter(["<1", "5"])
    printable = "".join(map(chr, range(32, 127)))
    limits = EpisodeLimits(max_prompt_tokens=16, max_tokens=200, max_context=300)
    ended = play(asks, lambda text: next(left), characters=printable, limits=limits)
    assert ended.played is not None, ended.failure
    assert ended.played.total == 1.0
    [text] = [line["text"] for line in ended.played.transcript if line["role"] == "tool"]
    assert "'other'" in text
    assert "lookup" in text


class Unusual(BaseException):
    """No Exception."""


@pytest.mark.parametrize(
    "error", [Unusual(), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_a_base_exception_fails_the_episode(error: BaseException) -> None:
    """It neither ends the event loop nor looks like an aborted episode."""

    @rlsys.environment(num_retries=1)
    async def broken(chat: Any, task: Any) -> float:
        await chat("1")
        raise error

    ended = play(broken, lambda text: "5")
    assert ended.failure is not None
    assert ended.failure.kind == "exception"
    assert ended.failure.message.startswith("broken raised ")
    assert type(error).__name__ in ended.failure.message


def test_a_group_reward_that_exits_fails() -> None:
    def exits(rollouts: Any) -> Any:
        raise SystemExit(3)

    @rlsys.environment(group_reward=exits)
    async def fine(chat: Any, task: Any) -> float:
        await chat("1")
        return 1.0

    ended = play(fine, lambda text: "5")
    assert ended.failure is not None
    assert "fine's group_reward raised SystemExit: 3" in ended.failure.message


def test_an_episode_that_fails_once_is_retried() -> None:
    attempts: list[int] = []

    @rlsys.environment
    async def shaky(chat: Any, task: Any) -> float:
        attempts.append(1)
        await chat("1")
        if len(attempts) == 1:
            raise OSError("no server")
        return 1.0

    ended = play(shaky, lambda text: "5")
    assert ended.played is not None
    assert ended.played.total == 1.0
    assert len(ended.played.trajectory.token_ids) == 2  # of the second attempt alone


def test_timeout_s_does_not_include_sampling() -> None:
    @rlsys.environment(timeout_s=10, num_retries=0)
    async def slow(chat: Any, task: Any) -> float:
        for seconds in task["seconds"]:
            await asyncio.sleep(seconds)
            await chat("1")
        return 1.0

    ended = play(slow, lambda text: "5", {"seconds": [4, 5]}, delay_s=100.0)
    assert ended.played is not None
    ended = play(slow, lambda text: "5", {"seconds": [4, 7]}, delay_s=100.0)
    assert ended.failure is not None
    assert ended.failure.kind == "timeout"
    assert "timeout_s=10" in ended.failure.message


def test_waiting_counts_neither_for_the_environment_nor_for_its_tool() -> None:
    @rlsys.tool(timeout_s=1)
    async def queued(seconds: float) -> str:
        """Wait for a place, then work."""
        with waiting() as begin:
            await asyncio.sleep(100)
            begin()
            await asyncio.sleep(seconds)
        return "done"

    @rlsys.environment(timeout_s=10, num_retries=0)
    async def busy(chat: Any, task: Any) -> float:
        with waiting():
            await asyncio.sleep(100)
        answers = await ToolSet([queued]).call_all(
            [ToolCall(name="queued", arguments={"seconds": task["seconds"]}, id="0")]
        )
        await chat("1")
        return float(answers[0]["content"] == "done")

    for seconds, total in ((0.5, 1.0), (1.5, 0.0)):
        ended = play(busy, lambda text: "5", {"seconds": seconds})
        assert ended.played is not None, ended.failure
        assert ended.played.total == total


def test_a_function_that_swallows_its_cancellation_is_abandoned() -> None:
    swallowed: list[int] = []

    @rlsys.environment(timeout_s=10, num_retries=0)
    async def stubborn(chat: Any, task: Any) -> float:
        await chat("1")
        while len(swallowed) < 2:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                swallowed.append(1)
        return 1.0

    ended = play(stubborn, lambda text: "5")
    assert ended.failure is not None
    assert ended.failure.kind == "timeout"
    assert swallowed  # the host did not wait for it


def test_forks_are_branches_that_share_a_prefix() -> None:
    @rlsys.environment
    async def forked(chat: Any, task: Any) -> float:
        await chat("1")
        other = chat.fork()
        first = await chat("2")
        chat.reward(0.5)
        second = await other("3")
        other.reward(0.25)
        return float(first) + float(second)

    ended = play(forked, lambda text: "4" if text.endswith("2") else "5")
    assert ended.played is not None
    trajectory = ended.played.trajectory
    paths = [path.tolist() for path in trajectory.paths()]
    assert paths == [[4, 8, 2, 5, 7, 2], [4, 8, 2, 6, 8, 2]]
    assert trajectory.branches.tolist() == [5, -1, 1, 0, 3, 0, 3, 0]
    assert trajectory.turn_rewards.tolist() == [0, 0, 0, 0, 0.5, 0, 0, 9.25]


def test_seats_have_conversations_of_their_own() -> None:
    @rlsys.environment(seats=("first", "second"))
    async def game(chat: Any, task: Any) -> dict[str, float]:
        one, two = chat.seat("first"), chat.seat("second")
        await one("1")
        one.reward(1.0, "first")
        await two("2")
        two.reward(-1.0, "second")
        return {}

    ended = play(game, lambda text: "5")
    assert ended.played is not None
    assert ended.played.components == {"first": 1.0, "second": -1.0}
    trajectory = ended.played.trajectory
    assert trajectory.branches.tolist() == [2, -1, 1, 0, 3, -1, 0, 1]
    assert [path.tolist() for path in trajectory.paths()] == [[4, 8, 2], [5, 8, 2]]
    assert trajectory.policy_versions.tolist() == [7, 7, -1, 7, 7]
    assert trajectory.turn_rewards.tolist() == [0, 1, 0, 0, -1]
    said = [(one["branch"], one["seat"], one["text"]) for one in ended.played.transcript]
    assert said == [
        *((0, "first", "1"), (0, "first", "5<eos>")),
        *((1, "second", "2"), (1, "second", "5<eos>")),
    ]


def test_a_seat_has_one_conversation() -> None:
    @rlsys.environment(seats=("first", "second"))
    async def game(chat: Any, task: Any) -> float:
        await chat.seat("second")("1")
        await chat.seat("second")("2")
        assert chat.seat("first") is chat
        assert chat.fork().seat("second") is chat.seat("second")
        return float(len(chat.seat("second").messages))

    ended = play(game, lambda text: "5")
    assert ended.played is not None, ended.failure
    assert ended.played.total == 4.0
    assert ended.played.trajectory.num_branches == 1


def test_rewards_of_one_name_are_added() -> None:
    @rlsys.environment(group_reward=lambda rollouts: [0.5] * len(rollouts))
    async def found(chat: Any, task: Any) -> dict[str, float]:
        await chat("1")
        chat.reward(-0.25, "found")
        chat.reward(-0.125, "group")
        return {"found": 1.0, "group": 2.0}

    ended = play(found, lambda text: "5")
    assert ended.played is not None
    assert ended.played.components == {"found": 0.75, "group": 2.375}
    assert ended.played.total == 3.125
    assert ended.played.trajectory.turn_rewards.sum() == 3.125


@pytest.mark.parametrize(("is_cut", "text"), [(True, "5<bos>"), (False, "5")])
def test_a_special_token_ends_the_text_unless_the_reply_was_cut(is_cut: bool, text: str) -> None:
    # The episode itself ended well, so that its own finish reason is "stop" in both cases.
    @rlsys.environment
    async def once(chat: Any, task: Any) -> float:
        await chat("1", max_tokens=2)
        return 1.0

    async def run() -> tuple[str, str]:
        host, sampler = hosted(once, lambda text: "5")
        sampler.end, sampler.cuts_at_end = 1, is_cut
        (ended,) = await played(host, [request()])
        await host.close()
        assert ended.played is not None
        return ended.played.finish_reason, host.rollout(ended).completion_text

    assert run_in_virtual_time(run()) == ("stop", text)


def test_a_group_reward_sees_the_whole_group() -> None:
    def spread(rollouts: Any) -> list[float]:
        numbers = [float(one.completion_text.removesuffix("<eos>")) for one in rollouts]
        return [number - min(numbers) for number in numbers]

    @rlsys.environment(group_reward=spread)
    async def number(chat: Any, task: Any) -> float:
        await chat(str(task["n"]))
        return 1.0

    async def run() -> list[Ended]:
        host, _ = hosted(number, lambda text: text[-1])
        requests = [request(n, group_size=3, task={"n": n + 3}) for n in range(3)]
        return await played(host, requests)

    ended = run_in_virtual_time(run())
    assert [one.played.total for one in ended if one.played] == [1.0, 2.0, 3.0]
    assert ended[2].played is not None
    assert ended[2].played.components == {"final": 1.0, "group": 2.0}
    assert ended[2].played.trajectory.turn_rewards.tolist() == [0.0, 3.0]


@pytest.mark.parametrize("first_s", [0, 2])
def test_a_group_in_which_one_fails_does_not_wait(first_s: float) -> None:
    """Each is returned once, whether it ended before or after the failure."""

    @rlsys.environment(group_reward=lambda rollouts: [9.0] * len(rollouts), num_retries=0)
    async def sometimes(chat: Any, task: Any) -> float:
        await chat("1")
        await asyncio.sleep(task["delay_s"])
        if task["delay_s"] == 1:
            raise OSError("no server")
        return 1.0

    async def run() -> list[Ended]:
        host, _ = hosted(sometimes, lambda text: "5")
        delays = [first_s, 1, 3]
        return await played(
            host, [request(n, group_size=3, task={"delay_s": delays[n]}) for n in range(3)]
        )

    ended = run_in_virtual_time(asyncio.wait_for(run(), 100))
    assert [one.played for one in ended] == [None] * 3
    for one in ended:
        assert one.failure is not None
        assert "sometimes raised OSError: no server" in one.failure.message


def test_aborted_episodes_have_no_outcome() -> None:
    @rlsys.environment
    async def waits(chat: Any, task: Any) -> float:
        await chat("1")
        await asyncio.sleep(100)
        return 1.0

    async def run() -> Ended:
        host, _ = hosted(waits, lambda text: "5")
        host.submit([request(0)])
        await asyncio.sleep(1)
        host.abort(["0.0.0", "unknown"])
        (ended,) = await host.collect()
        assert host.num_running == 0
        return ended

    ended = run_in_virtual_time(run())
    assert ended.played is None
    assert ended.failure is None


def test_limits_hold_over_branches() -> None:

    @rlsys.environment
    async def many(chat: Any, task: Any) -> float:
        await chat("1")
        await asyncio.gather(*(chat.fork()(str(n)) for n in range(9)), return_exceptions=True)
        return 1.0

    limits = EpisodeLimits(max_prompt_tokens=16, max_tokens=20, max_context=80)
    ended = play(many, lambda text: "77777", limits=limits)
    assert ended.played is not None
    assert len(ended.played.trajectory.token_ids) <= 20
    assert LIMITS.max_tokens == 64


def test_an_episode_of_too_many_branches_fails() -> None:
    @rlsys.environment(max_turns=80)
    async def forks(chat: Any, task: Any) -> float:
        for _ in range(MAX_BRANCHES + 1):
            await chat.fork()("1")
        return 1.0

    limits = EpisodeLimits(max_prompt_tokens=16, max_tokens=999, max_context=80)
    ended = play(forks, lambda text: "5", limits=limits)
    assert ended.failure is not None
    assert ended.failure.kind == "type"
    assert str(MAX_BRANCHES + 1) in ended.failure.message
