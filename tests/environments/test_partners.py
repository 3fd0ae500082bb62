"""Seats played by a frozen model, whose tokens are not part of the rollout."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import rlsys
from rlsys.environments.environment import Environment
from rlsys.environments.episode import Partner
from rlsys.environments.episode_host import Ended, EpisodeHost
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.turn_columns import num_by_seat, seats_of
from rlsys.environments.workers.sync_worker import SyncWorkerFunctions
from rlsys.launcher.tiny_models import build_tokenizer
from tests.environments.playing import (
    CHARACTERS,
    LIMITS,
    InThreads,
    Says,
    Scripted,
    played,
    request,
)

# Other ids for the same characters: 'ab' and the digits in reverse.
THEIRS = "ab987654321?0<>"


def play(
    environment: Environment,
    says: Says,
    partner_says: Says,
    *,
    limits: EpisodeLimits = LIMITS,
    seat: int = 1,
) -> tuple[Ended, Scripted, Scripted]:
    """Play one episode; return it with the samplers of the policy and the partner."""
    own, theirs = Codec(build_tokenizer(CHARACTERS), chat_template=""), codec_of_partner()
    sampler, partner = Scripted(own, says), Scripted(theirs, partner_says)

    async def run() -> Ended:
        plain = InThreads()
        functions = (
            plain
            if environment.is_async
            else SyncWorkerFunctions(environment, memory_gib=4.0, start_timeout_s=120.0)
        )
        host = EpisodeHost(
            environment,
            own,
            sampler,
            limits=limits,
            executor=functions,
            partners={seat: Partner(codec=theirs, sampler=partner)},
        )
        await host.start()
        try:
            (ended,) = await played(host, [request()])
        finally:
            await host.close()
        return ended

    return asyncio.run(run()), sampler, partner


def codec_of_partner() -> Codec:
    return Codec(build_tokenizer(THEIRS), chat_template="")


@rlsys.environment(seats=("first", "second"))
async def game(chat: Any, task: Any) -> dict[str, float]:
    """The policy replies with a number, the partner with a letter, which is sent to the policy."""
    two = chat.seat("second")
    move = await chat("1")
    answer = await two(move)
    two.reward(-5.0)
    reply = await chat("2" if answer == "a" else "3")
    chat.reward(1.0)
    return {"won": float(reply == "4")}


def test_the_rollout_contains_of_a_partner_only_messages_to_the_policy() -> None:
    ended, sampler, partner = play(game, lambda text: "4" if "2" in text else "5", lambda text: "a")
    assert ended.played is not None, ended.failure
    assert ended.played.total == 2.0
    assert ended.played.components == {"turns": 1.0, "won": 1.0}
    trajectory = ended.played.trajectory
    # "1" | "5" end | "2" | "4" end: one line, nothing of the partner's tokens in it.
    assert [path.tolist() for path in trajectory.paths()] == [[4, 8, 2, 5, 7, 2]]
    assert trajectory.policy_versions.tolist() == [7, 7, -1, 7, 7]
    assert trajectory.turn_rewards.tolist() == [0, 0, 0, 0, 2]
    assert trajectory.branches.tolist() == [5, -1, 1, 0]
    theirs = codec_of_partner().boundary
    (asked,) = partner.asked
    assert theirs.decode(list(asked.prompt_token_ids)) == "5"
    assert len(sampler.asked) == 2
    # Ids of turns differ over all who sample, so that seeds and answers do.
    ids = [one.request_id for one in (*sampler.asked, *partner.asked)]
    assert len(set(ids)) == 3
    assert len({one.seed for one in (*sampler.asked, *partner.asked)}) == 3


def test_a_transcript_names_the_seats() -> None:
    ended, _, _ = play(game, lambda text: "5", lambda text: "b")
    assert ended.played is not None, ended.failure
    lines = [
        (one["branch"], one["seat"], one["role"], one["text"].removesuffix("<eos>"), one["sampled"])
        for one in ended.played.transcript
    ]
    assert lines == [
        (0, "first", "user", "1", False),
        (0, "first", "assistant", "5", True),
        (0, "first", "user", "3", False),
        (0, "first", "assistant", "5", True),
        (1, "second", "user", "5", False),
        (1, "second", "assistant", "b", False),
    ]


def test_the_first_seat_may_be_a_partners() -> None:
    @rlsys.environment(seats=("first", "second"))
    async def begins(chat: Any, task: Any) -> float:
        number = await chat("1")
        chat.reward(3.0)
        await chat.seat("second")(number)
        return 1.0

    ended, _, _ = play(begins, lambda text: "5", lambda text: "9", seat=0)
    assert ended.played is not None, ended.failure
    assert ended.played.total == 1.0
    trajectory = ended.played.trajectory
    assert [path.tolist() for path in trajectory.paths()] == [[12, 8, 2]]
    assert trajectory.branches.tolist() == [2, -1, 1, 1]
    assert trajectory.turn_rewards.tolist() == [0, 1]


def test_parse_errors_about_a_partners_reply_are_raised() -> None:
    @rlsys.environment(seats=("first", "second"), num_retries=0, format_reward=-9.0)
    async def catches(chat: Any, task: Any) -> float:
        await chat("1")
        try:
            await chat.seat("second")("1", parse=int)
        except ValueError:
            return 7.0  # the partner forfeits
        return 0.0

    @rlsys.environment(seats=("first", "second"), num_retries=0, format_reward=-9.0)
    async def lets_pass(chat: Any, task: Any) -> float:
        await chat("1")
        return float(await chat.seat("second")("1", parse=int))

    ended, _, _ = play(catches, lambda text: "5", lambda text: "a")
    assert ended.played is not None, ended.failure
    assert ended.played.total == 7.0
    ended, _, _ = play(lets_pass, lambda text: "5", lambda text: "a")
    assert ended.failure is not None
    assert "invalid literal for int() with base 10: 'a'" in ended.failure.message


@rlsys.environment(seats=("first", "second"), num_retries=0, format_reward=-9.0)
def plain(chat: Any, task: Any) -> float:
    two = chat.seat("second")
    chat("1")
    try:
        two.fork()("1", parse=int)
    except ValueError:
        chat("1", parse=int)
    return 0.0


def test_parse_errors_about_a_partners_reply_in_a_synchronous_function() -> None:
    ended, _, _ = play(plain, lambda text: "?", lambda text: "a")
    assert ended.played is not None, ended.failure
    assert ended.played.total == -9.0  # of the policy's own
    assert ended.played.transcript[-1]["role"] == "ended"
    assert "'?'" in ended.played.transcript[-1]["text"]


def test_a_partner_may_reply_after_the_policys_last_turn() -> None:
    @rlsys.environment(seats=("first", "second"), max_turns=1, format_reward=-9.0)
    async def last(chat: Any, task: Any) -> float:
        move = await chat("1")
        assert chat.done
        answer = await chat.seat("second")(move)
        if task:
            await chat("1")
        return float(answer == "b")

    ended, _, _ = play(last, lambda text: "5", lambda text: "b")
    assert ended.played is not None, ended.failure
    assert ended.played.total == 1.0
    assert ended.played.finish_reason == "stop"


def test_a_partner_has_its_own_budget() -> None:
    """Its tokens do not count for the policy. The episode ends when they are used up."""

    @rlsys.environment(seats=("first", "second"), format_reward=-9.0)
    async def long(chat: Any, task: Any) -> float:
        await chat("1")
        for _ in range(100):
            await chat.seat("second")("1")
            if chat.truncated:
                return 2.0
        return 0.0

    limits = EpisodeLimits(max_prompt_tokens=4, max_tokens=7, max_context=11)
    ended, _, partner = play(long, lambda text: "555", lambda text: "a", limits=limits)
    assert ended.played is not None, ended.failure
    assert ended.played.total == 2.0
    assert ended.played.finish_reason == "length"
    assert ended.played.trajectory.num_branches == 1
    # 7 beyond its first prompt: 2 of a reply, 1 + 2, and 1 + 1 of one that is cut short.
    assert len(partner.asked) == 3
    assert partner.asked[-1].sampling.max_tokens == 1


def test_an_episode_with_replies_of_a_partner_only_has_no_tokens() -> None:
    @rlsys.environment(seats=("first", "second"), num_retries=0)
    async def alone(chat: Any, task: Any) -> float:
        await chat.seat("second")("1")
        return 1.0

    ended, _, _ = play(alone, lambda text: "5", lambda text: "a")
    assert ended.played is not None, ended.failure
    assert ended.played.total == 1.0
    assert len(ended.played.trajectory.token_ids) == 0
    assert [(line["seat"], line["sampled"]) for line in ended.played.transcript] == [
        ("second", False),
        ("second", False),
    ]


def test_too_long_a_first_text_of_a_partner_fails() -> None:
    @rlsys.environment(seats=("first", "second"), num_retries=0)
    async def longwinded(chat: Any, task: Any) -> float:
        await chat("1")
        await chat.seat("second")("1" * 30)
        return 1.0

    ended, _, _ = play(longwinded, lambda text: "5", lambda text: "a")
    assert ended.failure is not None
    assert "frozen model" in ended.failure.message
    assert "longwinded" in ended.failure.message
    assert "30 tokens" in ended.failure.message


@pytest.mark.parametrize("seat", [0, 1])
def test_forks_of_a_seat_have_its_seat(seat: int) -> None:
    @rlsys.environment(seats=("first", "second"))
    async def forks(chat: Any, task: Any) -> float:
        for one in (chat, chat.seat("second")):
            await one("1")
            await one.fork()("2")
        return 1.0

    ended, sampler, partner = play(forks, lambda text: "5", lambda text: "9", seat=seat)
    assert ended.played is not None, ended.failure
    assert len(sampler.asked) == len(partner.asked) == 2
    assert ended.played.trajectory.num_branches == 1
    assert set(ended.played.trajectory.branches.reshape(-1, 4)[:, 3]) == {1 - seat}


def test_another_policy_plays_a_seat_of_the_same_rollout() -> None:
    """Trained policies share the rollout and its limits; only the samplers differ."""

    @rlsys.environment(seats=("first", "second"), max_turns=3)
    async def both(chat: Any, task: Any) -> dict[str, float]:
        two = chat.seat("second")
        move = await chat("1")
        answer = await two(move)
        two.reward(-2.0)
        await chat(answer)
        return {"won": 1.0 if two.done and chat.done else 0.0}

    codec = Codec(build_tokenizer(CHARACTERS), chat_template="")
    sampler, other = Scripted(codec, lambda text: "4"), Scripted(codec, lambda text: "9")

    async def run() -> Ended:
        host = EpisodeHost(
            both,
            codec,
            sampler,
            limits=LIMITS,
            executor=InThreads(),
            partners={1: Partner(codec=None, sampler=other)},
        )
        (ended,) = await played(host, [request()])
        return ended

    ended = asyncio.run(run())
    assert ended.played is not None, ended.failure
    assert ended.played.components == {"turns": -2.0, "won": 1.0}
    trajectory = ended.played.trajectory
    first, second = (path.tolist() for path in trajectory.paths())
    assert (first, second) == ([4, 7, 2, 12, 7, 2], [7, 12, 2])
    assert len(sampler.asked) == 2
    assert len(other.asked) == 1
    seats = seats_of(trajectory)
    assert seats.tolist() == [0] * 5 + [1] * 3
    assert trajectory.policy_versions.tolist() == [7, 7, -1, 7, 7, -1, 7, 7]
    assert trajectory.turn_rewards.tolist() == [0, 0, 0, 0, 1, 0, 0, -2]
    assert num_by_seat(trajectory.policy_versions, seats) == (4, 2)
    assert [line["sampled"] for line in ended.played.transcript if line["seat"] == "second"] == [
        False,
        True,
    ]


def test_a_rejected_reply_of_another_policy_gets_the_format_reward() -> None:
    @rlsys.environment(seats=("first", "second"), format_reward=-9.0)
    async def parses(chat: Any, task: Any) -> float:
        return float(await chat.seat("second")("1", parse=int))

    codec = Codec(build_tokenizer(CHARACTERS), chat_template="")

    async def run() -> Ended:
        partners = {1: Partner(codec=None, sampler=Scripted(codec, lambda text: "?"))}
        host = EpisodeHost(
            parses,
            codec,
            Scripted(codec, lambda text: "4"),
            limits=LIMITS,
            executor=InThreads(),
            partners=partners,
        )
        (ended,) = await played(host, [request()])
        return ended

    ended = asyncio.run(run())
    assert ended.played is not None, ended.failure
    assert ended.played.total == -9.0
