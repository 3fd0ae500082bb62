"""Token budget of concurrent calls of one episode."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.environments.environment import Environment
from rlsys.environments.episode import Episode, EpisodeOver, Sampler
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.tokens.codec import Codec
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.types import FinishReason, Generation, GenerationRequest, SamplingParams
from tests.errors import invalid

CODEC = Codec(build_tokenizer("0123456789?"), chat_template="")


class Timed:
    """Sampler that replies with (number of tokens, after seconds) call by call."""

    def __init__(self, calls: list[tuple[int, int]]) -> None:
        self._calls = iter(calls)
        self.asked: list[tuple[float, int]] = []  # time, tokens requested

    async def sample(self, request: GenerationRequest) -> Generation:
        length, seconds = next(self._calls)
        wanted = request.sampling.max_tokens
        self.asked.append((asyncio.get_running_loop().time(), wanted))
        await asyncio.sleep(seconds)
        num = min(length, wanted)
        return Generation(
            request_id=request.request_id,
            token_ids=np.full(num, 5, np.int32),
            sampler_logprobs=np.full(num, -0.5, np.float32),
            policy_versions=np.zeros(num, np.int32),
            finish_reason=FinishReason.LENGTH if num < length else FinishReason.STOP,
        )


async def _nothing(chat: Any, task: Any) -> float:
    return 0.0


def episode(sampler: Sampler, *, max_tokens: int = 20, **limits: Any) -> Episode:
    return Episode(
        key="e",
        environment=Environment(function=_nothing, name="nothing", **limits),
        codec=CODEC,
        sampler=sampler,
        limits=EpisodeLimits(max_prompt_tokens=8, max_tokens=max_tokens, max_context=64),
        base=SamplingParams(max_tokens=max_tokens),
        seed=0,
    )


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_calls_that_may_use_all_tokens_wait_for_each_other() -> None:
    async def run() -> None:
        sampler = Timed([(4, 1), (4, 1), (4, 1)])
        one = episode(sampler)
        await asyncio.gather(*(one.turn(says("?")) for _ in range(3)))
        # Each requests all tokens left: 20, then what the earlier replies have not used.
        assert sampler.asked == [(0, 20), (1, 16), (2, 12)]
        assert not one.is_over

    run_in_virtual_time(run())


def test_calls_that_fit_run_concurrently_and_share_the_first_prompt() -> None:
    async def run() -> None:
        sampler = Timed([(4, 1)] * 5)
        one = episode(sampler)
        await asyncio.gather(*(one.turn(says("????"), max_tokens=5) for _ in range(5)))
        # Four fit at once, since their prompt does not count; the fifth waits for one.
        assert sampler.asked == [(0, 5)] * 4 + [(1, 4)]
        assert one.is_truncated is False

    run_in_virtual_time(run())


def test_a_reply_without_tokens_is_not_requested() -> None:
    async def run() -> None:
        sampler = Timed([(4, 1)])
        one = episode(sampler)
        for max_tokens in (0, -1):
            with invalid("max_tokens", max_tokens):
                await one.turn(says("?"), max_tokens=max_tokens)
        await one.turn(says("?"), max_tokens=1)
        assert sampler.asked == [(0, 1)]

    run_in_virtual_time(run())


def test_a_different_first_prompt_waits_for_the_first_one() -> None:
    async def run() -> None:
        sampler = Timed([(2, 1), (2, 1)])
        one = episode(sampler)
        await asyncio.gather(
            one.turn(says("???"), max_tokens=2), one.turn(says("1234"), max_tokens=2)
        )
        assert [when for when, _ in sampler.asked] == [0, 1]
        trajectory = one.played(1.0).trajectory
        assert len(trajectory.prompt_token_ids) == 3
        assert len(trajectory.token_ids) == 2 + 4 + 2

    run_in_virtual_time(run())


def test_a_cancelled_call_releases_its_tokens_and_its_turn() -> None:
    async def run() -> None:
        sampler = Timed([(20, 9), (20, 1)])
        one = episode(sampler, max_turns=1)
        call = asyncio.ensure_future(one.turn(says("???")))
        await asyncio.sleep(1)
        call.cancel()
        await asyncio.wait([call])
        turn = await one.turn(says("1"))
        assert len(turn.token_ids) == 20
        assert one.played(1.0).trajectory.prompt_token_ids.tolist() == [4]

    run_in_virtual_time(run())


def test_a_cancelled_call_of_several_replies_adds_none_and_releases_their_turns() -> None:
    async def run() -> None:
        sampler = Timed([(2, 1), (2, 1), (2, 9), (2, 1), (4, 1), (6, 2)])
        one = episode(sampler, max_turns=3)
        call = asyncio.ensure_future(one.replies(says("???"), num=3, max_tokens=6))
        await asyncio.sleep(2)  # two replies have been sampled
        with pytest.raises(EpisodeOver):  # all turns are taken
            await one.turn(says("?"))
        call.cancel()
        await asyncio.wait([call])
        assert not one.turns
        assert not one.is_over
        turns = await one.replies(says("12"), num=3, max_tokens=6)
        assert [len(turn.token_ids) for turn in turns if turn is not None] == [2, 4, 6]
        trajectory = one.played(1.0).trajectory
        assert trajectory.prompt_token_ids.tolist() == CODEC.text.encode_plain("12")
        assert len(trajectory.token_ids) == 2 + 4 + 6

    run_in_virtual_time(run())


def test_replies_to_one_request_wait_for_each_others_unused_tokens() -> None:
    """The first one may use all 20 tokens, and so may the second; 12 are left after 8."""

    async def run() -> None:
        sampler = Timed([(8, 3), (5, 1), (7, 1)])
        one = episode(sampler)
        turns = await one.replies(says("???"), num=3)
        assert sampler.asked == [(0, 20), (3, 12), (4, 7)]
        assert [turn and len(turn.token_ids) for turn in turns] == [8, 5, 7]
        assert not one.is_truncated

    run_in_virtual_time(run())


def test_prompts_of_one_request_share_the_tokens_of_their_beginning() -> None:
    """The first reply takes 2 of 4 tokens, the second prompt's last token and its reply 1 each."""

    async def run() -> None:
        sampler = Timed([(2, 1), (1, 1)])
        one = episode(sampler, max_tokens=4)
        prompts = [one.text_prompt("???12"), one.text_prompt("???13")]
        turns = await one.complete(prompts)
        assert [turn and len(turn.token_ids) for turn in turns] == [2, 1]
        trajectory = one.played(1.0).trajectory
        assert len(trajectory.token_ids) == 2 + 1 + 1

    run_in_virtual_time(run())


CALLS = st.lists(
    st.tuples(
        st.integers(0, 9),  # begins at, s
        st.sampled_from(["?", "??", "12", "123", "9876543"]),
        st.sampled_from([None, 1, 3, 8]),  # max_tokens
        st.sampled_from([None, 2]),  # hangs up after, s
        st.booleans(),  # without a chat template
        st.integers(1, 3),  # answers
    ),
    min_size=1,
    max_size=12,
)


@given(CALLS, st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), min_size=36, max_size=36))
def test_a_rollout_never_has_more_tokens_than_the_store_keeps_for_it(
    calls: Any, replies: list[tuple[int, int]]
) -> None:
    async def run() -> None:
        sampler = Timed(replies)
        one = episode(sampler, max_tokens=24)

        async def call(
            at: int, text: str, most: int | None, patience: int | None, is_raw: bool, num: int
        ) -> None:
            await asyncio.sleep(at)
            async with asyncio.timeout(patience):
                if is_raw:
                    await one.complete(
                        [one.text_prompt(text), one.text_prompt(text + "1")][:num], max_tokens=most
                    )
                else:
                    await one.replies(says(text), num=num, max_tokens=most)

        ended = await asyncio.gather(*(call(*given) for given in calls), return_exceptions=True)
        assert all(isinstance(each, EpisodeOver | TimeoutError | None) for each in ended), ended
        if any(isinstance(each, EpisodeOver) for each in ended):
            assert one.is_truncated
        if one.turns:
            trajectory = one.played(1.0).trajectory
            assert len(trajectory.token_ids) <= 24
            assert len(trajectory.prompt_token_ids) <= 8
            num_sampled = sum(len(turn.token_ids) for turn in one.turns)
            assert int((trajectory.policy_versions >= 0).sum()) == num_sampled

    run_in_virtual_time(run())
