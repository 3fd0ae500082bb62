"""A judge: a frozen language model that scores rollouts by what it writes about them.

    Rollout ─► ask ─► question, in the judge's own tokens ─► generation engine ─► reply ─► parse
                                                                                           │
    score, or why there is none ◄──────────────────────────────────────────────────────────┘

What goes wrong with one rollout, in `ask`, with its question or in `parse`, is a RewardFailure in
place of its score; the others are scored.
"""

from __future__ import annotations

import asyncio
import copy
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.common.random_streams import request_seed
from rlsys.common.user_functions import name_of, number_of, printable
from rlsys.config import DataConfig, require
from rlsys.data.prompt_rendering import PromptRenderer
from rlsys.dataflow.graph.stages import JudgeStage
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.rewards.outcome import FailureKind, RewardFailure, failure_from, is_usable
from rlsys.text.chat_template import ending_of, template_text
from rlsys.text.guarded import TextEncoder
from rlsys.text.tokenizer_boundary import TokenizerBoundary, check_encodable
from rlsys.types import GenerationRequest, Rollout, SamplingParams

Verdict = float | RewardFailure

# What a message quotes of a reply: its end, where the score usually stands.
QUOTED_CHARACTERS = 200


class JudgeEngine:
    """One process's copy of a judge.

    `tokenizer` is that of the model which `engine` generates with, `context` how many tokens both
    take, question and reply together. `seed`: the run's. `engine` is started here, in an event loop
    that runs while rollouts are judged. Raises what its `start` does.
    """

    def __init__(
        self,
        stage: JudgeStage,
        engine: GenerationEngine,
        tokenizer: Any,
        *,
        context: int,
        seed: int,
    ) -> None:
        self._stage = stage
        self._engine = engine
        self._encode = QuestionEncoder(tokenizer)
        self._context = context
        self._seed = seed
        self._sampling = sampling_of(stage)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(engine.start())

    def judge(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """In the rollouts' order. Raises EngineError if the engine dies."""
        verdicts: dict[int, Verdict] = {}
        requests: list[GenerationRequest] = []
        for place, rollout in enumerate(rollouts):
            tokens = question(self._stage, rollout, self._encode, context=self._context)
            if isinstance(tokens, RewardFailure):
                verdicts[place] = tokens
                continue
            requests.append(
                GenerationRequest(
                    request_id=str(place),
                    prompt_token_ids=tokens,
                    sampling=self._sampling,
                    seed=request_seed(self._seed, rollout.group_id, rollout.index),
                    goes_on=False,
                )
            )
        replies = self._loop.run_until_complete(self._replies(requests))
        for place, reply in replies.items():
            verdicts[place] = score(self._stage, reply)
        return [verdicts[place] for place in range(len(rollouts))]

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()

    async def _replies(self, requests: Sequence[GenerationRequest]) -> dict[int, str]:
        """By request id."""
        replies: dict[int, str] = {}
        self._engine.submit(requests)
        while len(replies) < len(requests):
            ended = await self._engine.collect()
            for one in ended:
                replies[int(one.request_id)] = self._encode.boundary.completion_text(
                    one.token_ids.tolist(), one.finish_reason
                )
        return replies


def sampling_of(stage: JudgeStage) -> SamplingParams:
    if stage.temperature > 0:
        return SamplingParams(temperature=stage.temperature, max_tokens=stage.max_tokens)
    return SamplingParams(top_k=1, max_tokens=stage.max_tokens)


def question(
    stage: JudgeStage, rollout: Rollout, encode: QuestionEncoder, *, context: int
) -> list[int] | RewardFailure:
    """What the judge is asked about a rollout, in its tokens [P], with room for a reply."""
    told = _told(stage, "ask", stage.ask)
    try:
        asked = stage.ask(copy.deepcopy(rollout))  # a group's rollouts share their metadata
    # Whatever a user's function raises, SystemExit included, is the outcome of its rollout.
    except BaseException as error:  # noqa: BLE001
        return failure_from(stage.writes[0].name, error, told)
    try:
        token_ids = encode(asked, f"{told}, its question")
        room = context - stage.max_tokens
        require(
            0 < len(token_ids) <= room,
            f"{told}: a question of {len(token_ids)} tokens; the judge's context of {context}, "
            f"less max_tokens={stage.max_tokens} for the reply, has room for 1 to {room}. Let ask "
            "shorten it, lower max_tokens, or take a judge with a longer context (at most its "
            "pass_tokens).",
        )
    except ValueError as error:
        return _failure(stage, "question", str(error))
    return token_ids


class QuestionEncoder:
    """Encodes questions in a judge's own tokens.

    A chat's texts are guarded: a special token that the policy wrote is plain text to the judge.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.boundary = TokenizerBoundary(tokenizer)
        self._text = TextEncoder(self.boundary)
        self._renderer: PromptRenderer | None = None
        if template_text(tokenizer):
            self._renderer = PromptRenderer(DataConfig(chat_template=True), tokenizer)

    def __call__(self, asked: str | Sequence[Mapping[str, Any]], where: str) -> list[int]:
        """Return the tokens of a text as it is, or of a chat by the tokenizer's template. Raises
        ValueError, beginning with `where`.
        """
        require(
            isinstance(asked, str | list | tuple),
            f"{where}: {reprlib.repr(asked)} is neither a text nor a list of messages; let ask "
            "return one of them.",
        )
        if not isinstance(asked, str):
            return self._chat(asked, where)
        require(asked != "", f"{where} is empty; let ask return a text.")
        self.boundary.alphabet.check(check_encodable(asked, where), where)
        (token_ids,) = self.boundary.encode_prompts([asked], with_opening=True)
        return token_ids

    def _chat(self, asked: Sequence[Mapping[str, Any]], where: str) -> list[int]:
        renderer = self._renderer
        if renderer is None:
            raise ValueError(
                f"{where} is a chat, and the judge's tokenizer has no chat template; let ask "
                "return a text, or take a judge that has one."
            )
        messages = self._text.guarded(renderer.messages(asked, where))
        text = renderer.chat_text(messages, where, ending=ending_of(messages))
        return self._text.encode(text, after=None, cache={}, where=where)


def score(stage: JudgeStage, reply: str) -> Verdict:
    """What `parse` finds in a reply."""
    told, quoted = _told(stage, "parse", stage.parse), repr(reply[-QUOTED_CHARACTERS:])
    try:
        found: Any = stage.parse(reply)
    except BaseException as error:  # noqa: BLE001 - as of ask
        return failure_from(stage.writes[0].name, error, told)
    if found is None:
        message = (
            f"{told} finds no score in a reply that ends {quoted}; ask for another form, raise "
            f"max_tokens={stage.max_tokens}, or take a judge that keeps to what it is asked."
        )
        return _failure(stage, "reply", message)
    number = number_of(found)
    if number is None:
        message = f"{told} returned {reprlib.repr(found)}, no number; return a float, or None."
        return _failure(stage, "type", message)
    if not is_usable(number):
        message = f"{told} returned {number} of a reply that ends {quoted}; return finite numbers."
        return _failure(stage, "nan", message)
    return number


def _told(stage: JudgeStage, name: str, function: object) -> str:
    return f"judge {stage.model.name!r}, {name} {name_of(function)}"


def _failure(stage: JudgeStage, kind: FailureKind, message: str) -> RewardFailure:
    return RewardFailure(kind=kind, reward=stage.writes[0].name, message=printable(message))
