"""Errors of the endpoint, and which of them end or fail an episode."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

import rlsys
from rlsys.environments.endpoint import endpoint as endpoint_module
from rlsys.environments.endpoint.endpoint import MAX_BODY_BYTES, MAX_CALLS
from rlsys.environments.environment import Environment
from rlsys.environments.episode_host import Ended
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.types import MAX_BRANCHES, Generation, GenerationRequest
from tests.environments.asking import Asking, asking, client, play
from tests.environments.playing import Scripted, played, request
from tests.environments.templates import CHATML, FORGETTING, THINKING
from tests.tiers import rest_slow

QUESTION: list[Any] = [{"role": "user", "content": "?"}]


async def ask(policy: Any, **named: Any) -> Any:
    return await policy.chat.completions.create(**{"model": "m", "messages": QUESTION, **named})


def raw(endpoint: rlsys.Endpoint, key: str | None = None) -> httpx.AsyncClient:
    key = endpoint.key if key is None else key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=endpoint.url, headers=headers, timeout=60)


def by_hand(talk: Callable[[httpx.AsyncClient], Awaitable[None]]) -> Environment:
    """Return an agent that runs `talk` and then sends one valid request."""

    @rlsys.agent(num_retries=0)
    async def mine(endpoint: Any, task: Any) -> float:
        async with raw(endpoint) as http:
            await talk(http)
            answer = await http.post("/chat/completions", json={"messages": QUESTION})
            assert answer.status_code == 200, answer.text
        return 1.0

    return mine


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    return answer.status_code, error["code"], error["message"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/chat/completions", "{", "body: "),
        ("/chat/completions", "[" * 100_000, "nested too deeply"),
        ("/chat/completions", '"a"', "body='a'"),
        ("/chat/completions", {}, "messages=None"),
        ("/chat/completions", {"messages": []}, "messages=[]"),
        ("/chat/completions", {"messages": ["hi"]}, "messages[0]='hi'"),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content=",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content=5",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [5]}]},
            "messages[0].tool_calls=[5]",
        ),
        (
            "/chat/completions",
            {"messages": QUESTION, "response_format": {"type": "xml"}},
            "response_format={'type': 'xml'}",
        ),
        ("/chat/completions", {"messages": QUESTION, "n": 65}, "n=65"),
        ("/chat/completions", {"messages": QUESTION, "n": True}, "n=True"),
        ("/chat/completions", {"messages": QUESTION, "max_tokens": 0}, "max_tokens=0"),
        (
            "/chat/completions",
            {"messages": QUESTION, "max_completion_tokens": "9"},
            "max_completion_tokens='9'",
        ),
        ("/chat/completions", {"messages": QUESTION, "stop": 5}, "stop=5"),
        ("/chat/completions", {"messages": QUESTION, "stop": [""]}, "stop=['']"),
        ("/chat/completions", {"messages": QUESTION, "stop": ["a", "\ud800"]}, r"stop[1]='\ud800'"),
        (
            "/chat/completions",
            {"messages": [*QUESTION, {"role": "user", "content": "\ud800"}]},
            "messages[1].content=",
        ),
        (
            "/chat/completions",
            {
                "messages": QUESTION,
                "tools": [{"function": {"name": "f", "description": "\ud800"}}],
            },
            "tools[0].function.description=",
        ),
        ("/responses", {"input": "a", "instructions": "\ud800"}, "instructions="),
        ("/responses", {"input": [{"role": "user", "content": "\ud800"}]}, "input[0].content="),
        ("/completions", {"prompt": ["a", "\ud800"]}, "prompt[1]="),
        ("/completions", {"prompt": "a", "user": {"\ud800": 1}}, "user="),
        ("/completions", {"prompt": "a", "stop": "\ud800"}, r"stop='\ud800'"),
        ("/chat/completions", {"messages": QUESTION, "stop": ["a"] * 65}, "65"),
        ("/chat/completions", {"messages": QUESTION * 5000}, "5000"),
        ("/chat/completions", {"messages": QUESTION, "tools": [{}] * 2000}, "2000"),
        (
            "/chat/completions",
            {
                "messages": QUESTION,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": ["ab" * 20_000]}},
                },
            },
            "32768",
        ),
        ("/chat/completions", {"messages": QUESTION, "tools": [{}]}, "tools=[{}]"),
        (
            "/chat/completions",
            {"messages": QUESTION, "tool_choice": "required"},
            "tool_choice='required'",
        ),
        (
            "/chat/completions",
            {"messages": QUESTION, "tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools: ",
        ),
        ("/completions", {"prompt": ["a", ""]}, "prompt=['a', '']"),
        ("/completions", {"prompt": ""}, "prompt=''"),
        ("/completions", {"prompt": []}, "prompt=[]"),
        ("/completions", {"prompt": [1, -1]}, "prompt=[1, -1]"),
        ("/completions", {"prompt": [1, True]}, "prompt=[1, True]"),
        ("/completions", {"prompt": [1, 10**6]}, "1000000"),
        ("/completions", {"prompt": ["a"] * 33, "n": 2}, "66"),
        ("/completions", {"prompt": "a", "echo": True, "logprobs": 1}, "echo=True"),
        ("/responses", {"input": []}, "input=[]"),
        ("/responses", {"input": "a", "background": True}, "background=True"),
        ("/responses", {"input": [{"type": "computer_call"}]}, "computer_call"),
        ("/responses", {"input": "a", "previous_response_id": "resp_1"}, "resp_1"),
        ("/responses", {"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0]"),
        (
            "/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format={",
        ),
        ("/responses", {"input": "a", "text": "b"}, "text='b'"),
        ("/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens=0"),
        ("/responses", {"input": "a", "tools": [{"type": "function"}]}, "tools[0]="),
        (
            "/responses",
            {"input": "a", "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice={'name': 'f', 'type': 'function'}",
        ),
        ("/responses", {"input": [{"content": "a"}]}, "input[0].role=None"),
        ("/responses", {"input": [{"type": "function_call"}]}, "input[0].name=None"),
        (
            "/responses",
            {"input": [*QUESTION, {"role": "nobody", "content": "a"}]},
            "input[1].role='nobody'",
        ),
        ("/responses", {"input": [{"role": "user", "content": "a"}] * 5000}, "input: 5000"),
        ("/responses", {"input": "a", "stream": "true"}, "stream='true'"),
        ("/chat/completions", {"messages": QUESTION, "stream": 1}, "stream=1"),
        ("/chat/completions", {"messages": QUESTION, "logprobs": 1}, "logprobs=1"),
        (
            "/chat/completions",
            {"messages": QUESTION, "return_token_ids": 1},
            "return_token_ids=1",
        ),
        (
            "/chat/completions",
            {"messages": QUESTION, "parallel_tool_calls": "no"},
            "parallel_tool_calls='no'",
        ),
        (
            "/chat/completions",
            {"messages": QUESTION, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage='yes'",
        ),
        ("/completions", {"prompt": "a", "echo": "false"}, "echo='false'"),
        ("/completions", {"prompt": "a", "logprobs": "x"}, "logprobs='x'"),
        ("/completions", {"prompt": "a", "logprobs": -1}, "logprobs=-1"),
        ("/completions", {"prompt": "a", "logprobs": True}, "logprobs=True"),
        ("/responses", {"input": "a", "metadata": {"a": float("nan")}}, "body: "),
        ("/completions", '{"prompt": "a", "temperature": 1e999}', "body: "),
        (
            "/chat/completions",
            {
                "messages": QUESTION,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "bogus"}},
                },
            },
            "bogus",
        ),
        ("/completions", {"prompt": "a", "best_of": 2}, "best_of=2"),
    ],
)
def test_invalid_requests_are_not_sampled(path: str, body: Any, expected: str) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        status, _, message = error_of(await http.post(path, content=text))
        assert (status, expected in message) == (400, True), message

    ended, made = play(by_hand(talk), lambda text: "yes", template=FORGETTING)
    assert ended.played is not None, ended.failure
    assert len(made.sampler.asked) == 1


def test_a_body_that_is_too_long() -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        answer = await http.post("/completions", content=b"1" * (MAX_BODY_BYTES + 1))
        assert error_of(answer)[:2] == (413, "request_too_large")

    ended, _ = play(by_hand(talk), lambda text: "yes")
    assert ended.played is not None, ended.failure


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_cannot_be_decoded_is_an_invalid_request(
    encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        headers = {"Content-Encoding": encoding}
        body = json.dumps({"messages": QUESTION})
        answer = await http.post("/chat/completions", content=body, headers=headers)
        assert error_of(answer)[:2] == (400, "invalid_request")

    ended, _ = play(by_hand(talk), lambda text: "yes")
    assert ended.played is not None, ended.failure
    assert not [one for one in caplog.records if one.exc_info]


@pytest.mark.parametrize("framing", ["Content-Length: 99", "Transfer-Encoding: chunked"])
def test_a_body_that_does_not_arrive_is_answered(
    framing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a chunk that is malformed."""
    monkeypatch.setattr(endpoint_module, "BODY_TIMEOUT_S", 0.2)

    @rlsys.agent(num_retries=0)
    async def mine(endpoint: Any, task: Any) -> float:
        url = httpx.URL(endpoint.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {endpoint.key}"
        writer.write(f"{head}\r\n{framing}\r\n\r\n".encode())
        writer.write(b"1\r\n{\r\n")
        await writer.drain()
        if "chunked" in framing:
            writer.write(b"zz\r\n")
            await writer.drain()
        answer = await asyncio.wait_for(reader.readline(), 60)
        assert answer.split()[1] in (b"408", b"400")
        writer.close()
        async with client(endpoint) as policy:
            await ask(policy)
        return 1.0

    ended, _ = play(mine, lambda text: "yes")
    assert ended.played is not None, ended.failure


def test_the_error_about_an_unknown_route_lists_the_known_ones() -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        status, code, message = error_of(await http.post("/embeddings", json={}))
        assert (status, code) == (404, "not_found")
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"):
            assert path in message

    ended, _ = play(by_hand(talk), lambda text: "yes")
    assert ended.played is not None, ended.failure


def test_a_key_without_a_running_episode_is_invalid() -> None:
    keys = ["", "nonsense"]

    @rlsys.agent(num_retries=0)
    async def mine(endpoint: Any, task: Any) -> float:
        for key in keys:
            async with raw(endpoint, key) as http:
                for answer in (
                    await http.post("/chat/completions", json={"messages": QUESTION}),
                    await http.post("/completions", content="{"),
                    await http.get("/models"),
                ):
                    assert error_of(answer)[:2] == (401, "invalid_api_key")
        keys.append(endpoint.key)
        async with client(endpoint) as policy:
            await ask(policy)
        return 1.0

    async def run() -> None:
        async with asking(mine, lambda text: "yes") as made:
            for number in range(2):  # to the second the first's key is known
                (ended,) = await played(made.host, [request(number)])
                assert ended.played is not None, ended.failure

    asyncio.run(run())
    assert len(set(keys)) == 4


def test_requests_belong_to_the_episode_of_their_key() -> None:
    @rlsys.agent(num_retries=0)
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            for _ in range(3):
                await ask(policy, messages=[{"role": "user", "content": f"number {task['n']}"}])
        return 1.0

    async def run() -> list[Ended]:
        async with asking(mine, lambda text: "yes") as made:
            return await played(made.host, [request(n, task={"n": n}) for n in range(1, 9)])

    for ended in asyncio.run(run()):
        assert ended.played is not None, ended.failure
        prompts = [one["text"] for one in ended.played.transcript if not one["sampled"]]
        assert prompts == [f"number {ended.request.task['n']}"] * 3


def test_a_key_is_invalid_once_its_function_has_returned() -> None:
    async def run() -> None:
        late: list[rlsys.Endpoint] = []
        left: list[asyncio.Task[Any]] = []

        @rlsys.agent
        async def mine(endpoint: Any, task: Any) -> float:
            policy = client(endpoint)
            await ask(policy)
            left.append(asyncio.create_task(ask(policy)))
            await made.sampler.second.wait()
            late.append(endpoint)
            return 1.0

        async with asking(mine, lambda text: "yes", sampler=Stuck(2)) as made:
            (ended,) = await asyncio.wait_for(played(made.host, [request()]), 60)
            assert ended.played is not None, ended.failure
            # The running call was cancelled and is not part of the rollout.
            assert ended.played.trajectory.num_branches == 1
            with pytest.raises(openai.AuthenticationError):
                await left[0]
            assert made.sampler.num_cancelled == 1
            async with client(late[0]) as policy:
                with pytest.raises(openai.AuthenticationError):
                    await ask(policy)

    asyncio.run(run())


class Stuck:
    """A Scripted sampler that never ends the reply of this number."""

    def __init__(self, number: int) -> None:
        made = Asking(rlsys.agent(_nothing), lambda text: "yes", template=CHATML)
        self._scripted: Scripted = made.sampler
        self._number = number
        self.second = asyncio.Event()
        self.num_cancelled = 0
        self.num_asked = 0

    async def sample(self, request: GenerationRequest) -> Generation:
        self.num_asked += 1
        if self.num_asked != self._number:
            return await self._scripted.sample(request)
        self.second.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        raise AssertionError("unreachable")


async def _nothing(endpoint: Any, task: Any) -> float:
    return 0.0


def test_a_disconnected_client_releases_its_tokens_and_its_turn() -> None:
    async def run() -> None:
        @rlsys.agent(max_turns=2)
        async def mine(endpoint: Any, task: Any) -> float:
            async with client(endpoint) as policy:
                with pytest.raises(openai.APITimeoutError):
                    await ask(policy.with_options(timeout=0.3))
                # All tokens and both turns are available again.
                await asyncio.gather(ask(policy, max_tokens=500), ask(policy, max_tokens=500))
            return 1.0

        async with asking(mine, lambda text: "yes", sampler=Stuck(1)) as made:
            (ended,) = await asyncio.wait_for(played(made.host, [request()]), 60)
            assert made.sampler.num_cancelled == 1
        assert ended.played is not None, ended.failure
        assert ended.played.trajectory.num_branches == 2

    asyncio.run(run())


def test_too_many_concurrent_calls_get_status_429() -> None:
    async def run() -> None:
        class Slow(Stuck):
            async def sample(self, request: GenerationRequest) -> Generation:
                self.num_asked += 1
                await go_on.wait()
                return await self._scripted.sample(request)

        go_on = asyncio.Event()

        @rlsys.agent
        async def mine(endpoint: Any, task: Any) -> float:
            async with client(endpoint) as policy:
                calls = [
                    asyncio.create_task(ask(policy, max_tokens=8)) for _ in range(MAX_CALLS + 1)
                ]
                done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                (refused,) = done
                go_on.set()
                with pytest.raises(openai.RateLimitError) as found:
                    await refused
                assert str(MAX_CALLS) in found.value.message
                assert found.value.response.headers["retry-after"] == "1"
                await asyncio.wait(calls)
            return 1.0

        async with asking(mine, lambda text: "yes", sampler=Slow(0)) as made:
            (ended,) = await asyncio.wait_for(played(made.host, [request()]), 120)
            assert made.sampler.num_asked == MAX_CALLS
        assert ended.played is not None, ended.failure

    asyncio.run(run())


@pytest.mark.parametrize("does", ["raises", "returns"])
def test_a_full_context_ends_the_episode(does: str) -> None:
    errors: list[openai.BadRequestError] = []

    @rlsys.agent(format_reward=-1.0)
    async def mine(endpoint: Any, task: Any) -> float:
        messages = list(QUESTION)
        async with client(endpoint) as policy:
            while True:
                try:
                    answer = await ask(policy, messages=messages)
                except openai.BadRequestError as error:
                    errors.append(error)
                    if does == "raises":
                        raise
                    return 0.5
                messages += [answer.choices[0].message.model_dump(), *QUESTION]

    limits = EpisodeLimits(max_prompt_tokens=60, max_tokens=100, max_context=2000)
    ended, _ = play(mine, lambda text: "the answer is 42.", limits=limits)
    assert len(errors) == 1  # and no attempt more
    assert errors[0].code == "context_length_exceeded"
    assert ended.played is not None, ended.failure
    assert ended.played.finish_reason == "length"
    assert ended.played.total == (-1.0 if does == "raises" else 0.5)
    assert len(ended.played.trajectory.token_ids) <= 100


def test_used_up_turns_end_the_episode() -> None:
    @rlsys.agent(max_turns=2, format_reward=-1.0)
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            for _ in range(3):
                await ask(policy)
        return 1.0

    ended, made = play(mine, lambda text: "yes")
    assert ended.played is not None, ended.failure
    assert ended.played.total == -1.0
    assert ended.played.finish_reason == "stop"
    assert len(made.sampler.asked) == 2


def test_an_error_of_the_agent_is_retried() -> None:
    """Also after the last turn, as long as no request was rejected."""
    attempts: list[int] = []

    @rlsys.agent(max_turns=1, num_retries=1)
    async def mine(endpoint: Any, task: Any) -> float:
        attempts.append(1)
        async with client(endpoint) as policy:
            await ask(policy)
        raise OSError("no disk")

    ended, _ = play(mine, lambda text: "yes")
    assert len(attempts) == 2
    assert ended.failure is not None
    assert "no disk" in ended.failure.message


@pytest.mark.parametrize("error", [RuntimeError("engine is gone"), ValueError("engine is gone")])
@pytest.mark.parametrize("swallows", [False, True])
def test_an_error_of_the_sampler_is_not_a_reward(error: Exception, swallows: bool) -> None:
    """Even if the agent catches the error."""
    errors: list[openai.APIStatusError] = []

    class Failing:
        async def sample(self, request: GenerationRequest) -> Generation:
            raise error

    @rlsys.agent(num_retries=1)
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint, max_retries=5) as policy:
            try:
                await ask(policy)
            except openai.APIStatusError as failed:
                errors.append(failed)
                if not swallows:
                    raise
        return 0.0

    ended, _ = play(mine, lambda text: "yes", sampler=Failing())
    assert [one.status_code for one in errors] == [500, 500]  # one an attempt: none was tried again
    assert "engine is gone" in errors[0].message
    assert ended.failure is not None
    assert "engine is gone" in ended.failure.message


def test_a_first_prompt_that_is_too_long_fails_at_once() -> None:
    attempts: list[int] = []

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        attempts.append(1)
        async with client(endpoint) as policy:
            await ask(policy, messages=[{"role": "user", "content": "x" * 999}])
        return 1.0

    ended, _ = play(mine, lambda text: "yes")
    assert attempts == [1]
    assert ended.failure is not None
    assert "data.max_prompt_tokens=600" in ended.failure.message


def test_an_agent_that_takes_too_long_fails() -> None:
    @rlsys.agent(timeout_s=0.2, num_retries=0)
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            await ask(policy)
        await asyncio.Event().wait()
        return 1.0

    ended, _ = play(mine, lambda text: "yes")
    assert ended.failure is not None
    assert ended.failure.kind == "timeout"


def test_a_malformed_call_stays_a_text() -> None:
    """Clients raise on a call without a name, and on arguments that are not an object."""
    broken = [
        '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": }\n</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>oh</tool_call>',
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        messages = list(QUESTION)
        async with client(endpoint) as policy:
            for text in broken:
                answer = await ask(policy, messages=messages, tools=tools)
                choice = answer.choices[0]
                assert (choice.message.content, choice.finish_reason) == (text, "stop")
                assert choice.message.tool_calls is None
                messages += [choice.message.model_dump(), *QUESTION]
        return 1.0

    replies = iter(broken)
    ended, _ = play(mine, lambda text: next(replies), template=THINKING)
    assert ended.played is not None, ended.failure
    assert ended.played.trajectory.num_branches == 1  # matched when it is sent back


@pytest.mark.parametrize("at_once", rest_slow([1, 16], only=(16,)))
def test_used_up_branches_are_reported(at_once: int) -> None:
    """Also if many independent questions are sent at the same time."""
    errors: list[openai.BadRequestError] = []

    @rlsys.agent(format_reward=-1.0)
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            for first in range(0, MAX_BRANCHES + at_once, at_once):
                asked = [
                    ask(policy, messages=[{"role": "user", "content": f"{n}?"}], max_tokens=8)
                    for n in range(first, first + at_once)
                ]
                answers = await asyncio.gather(*asked, return_exceptions=True)
                errors.extend(one for one in answers if isinstance(one, openai.BadRequestError))
                if errors:
                    return 0.5
        return 1.0

    limits = EpisodeLimits(max_prompt_tokens=60, max_tokens=9999, max_context=200)
    ended, made = play(mine, lambda text: "yes", limits=limits)
    assert ended.played is not None, ended.failure
    assert ended.played.total == 0.5
    assert ended.played.finish_reason == "stop"
    assert ended.played.trajectory.num_branches == MAX_BRANCHES
    assert {one.code for one in errors} == {"max_branches_exceeded"}
    assert "64" in errors[0].message
    assert len(made.sampler.asked) == MAX_BRANCHES


def test_a_conversation_continues_when_branches_are_used_up() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            for n in range(MAX_BRANCHES):
                messages = [{"role": "user", "content": f"{n}?"}]
                answer = await ask(policy, messages=messages, max_tokens=8)
            messages += [answer.choices[0].message.model_dump(), *QUESTION]
            await ask(policy, messages=messages, max_tokens=8)
        return 1.0

    limits = EpisodeLimits(max_prompt_tokens=60, max_tokens=9999, max_context=200)
    ended, _ = play(mine, lambda text: "yes", limits=limits)
    assert ended.played is not None, ended.failure
    assert ended.played.total == 1.0
    assert ended.played.trajectory.num_branches == MAX_BRANCHES


MALFORMED = [
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET / HTTP/9.9.9\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nbad header\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
]


@pytest.mark.parametrize("sent", rest_slow(MALFORMED, first=2))
def test_malformed_http_prints_no_traceback(
    sent: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    @rlsys.agent(num_retries=0)
    async def mine(endpoint: Any, task: Any) -> float:
        url = httpx.URL(endpoint.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(sent)
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(4096), 60)
        writer.close()
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 401"))
        async with client(endpoint) as policy:
            await ask(policy)
        return 1.0

    gc.collect()  # clients of earlier tests, which would close themselves on this test's loop
    ended, _ = play(mine, lambda text: "yes")
    assert ended.played is not None, ended.failure
    assert not [one for one in caplog.records if one.exc_info]
    assert "Traceback" not in "".join(capfd.readouterr())
