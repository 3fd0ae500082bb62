"""Engine of a judge: a frozen language model that scores rollouts by a reply about them.

    Rollout ─► ask ─► question, in the judge's own tokens ─► generation engine ─► reply ─► parse
                                                                                           │
    score, or the reason of a failure ◄────────────────────────────────────────────────────┘

A failure of one rollout, in `ask`, in its question or in `parse`, becomes a RewardFailure in place
of its score. The other rollouts are scored.
"""

from __future__ import annotations

import asyncio
import copy
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.common.random_streams import request_seed
from rlsys.common.user_functions import name_of, number_of, printable
from rlsys.config import DataConfig
from rlsys.data.prompt_rendering import PromptRenderer
from rlsys.dataflow.graph.stages import JudgeStage
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.errors import InvalidValue, require
from rlsys.rewards.outcome import FailureKind, RewardFailure, failure_from, is_usable
from rlsys.text.chat_template import ending_of, template_text
from rlsys.text.guarded import TextEncoder
from rlsys.text.tokenizer_boundary import TokenizerBoundary, check_encodable
from rlsys.types import Generation, GenerationRequest, Rollout, SamplingParams

Verdict = float | RewardFailure

# Characters that a message quotes from a reply's end, which usually has the score.
QUOTED_CHARACTERS = 200

# Name of the question in the fixes of errors.
ASKED = "the result of ask"


class JudgeEngine:
    """Copy of a judge in one process.

    `tokenizer` belongs to the model of `engine`. `context` is the maximum number of tokens of
    question and reply together. `seed` is that of the run. `engine` is started here, in an event
    loop that runs while rollouts are judged; errors of its `start` are raised.
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
        """Return a score or a failure for each rollout, in order.

        Raises EngineError if the engine dies.
        """
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
            verdicts[place] = self._verdict(reply)
        return [verdicts[place] for place in range(len(rollouts))]

    def close(self) -> None:
        """Stop the engine."""
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()

    def _verdict(self, reply: Generation) -> Verdict:
        if reply.failure:
            label = f"judge {self._stage.model.name!r}"
            return _failure(self._stage, "nan", f"{label}: {reply.failure}")
        text = self._encode.boundary.completion_text(reply.token_ids.tolist(), reply.finish_reason)
        return score(self._stage, text)

    async def _replies(self, requests: Sequence[GenerationRequest]) -> dict[int, Generation]:
        """Return replies by request id."""
        replies: dict[int, Generation] = {}
        self._engine.submit(requests)
        while len(replies) < len(requests):
            replies |= {int(one.request_id): one for one in await self._engine.collect()}
        return replies


def sampling_of(stage: JudgeStage) -> SamplingParams:
    """Return the sampling parameters of a judge; temperature 0 means greedy."""
    if stage.temperature > 0:
        return SamplingParams(temperature=stage.temperature, max_tokens=stage.max_tokens)
    return SamplingParams(top_k=1, max_tokens=stage.max_tokens)


def question(
    stage: JudgeStage, rollout: Rollout, encode: QuestionEncoder, *, context: int
) -> list[int] | RewardFailure:
    """Return the question about a rollout in the judge's tokens [P], or the reason of a failure."""
    label = _label(stage, "ask", stage.ask)
    try:
        text = stage.ask(copy.deepcopy(rollout))  # a group's rollouts share their metadata
    # Any exception of a user's function, SystemExit included, is the outcome of its rollout.
    except BaseException as error:  # noqa: BLE001
        return failure_from(stage.writes[0].name, error, label)
    try:
        token_ids = encode(text, f"{label}: question")
        max_question = context - stage.max_tokens
        require(
            0 < len(token_ids) <= max_question,
            f"{label}: tokens of the question",
            len(token_ids),
            rule=f"must be in [1, {max_question}], the judge's context of {context} less "
            f"max_tokens={stage.max_tokens} for the reply",
            fix="Shorten the question in ask, lower max_tokens, or use a judge with a longer "
            "context (at most its pass_tokens).",
        )
    except ValueError as error:
        return _failure(stage, "question", str(error))
    return token_ids


class QuestionEncoder:
    """Encoder of questions in a judge's own tokens.

    Texts of a chat are guarded: a special token that the policy wrote is plain text to the judge.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.boundary = TokenizerBoundary(tokenizer)
        self._text = TextEncoder(self.boundary)
        self._renderer: PromptRenderer | None = None
        if template_text(tokenizer):
            self._renderer = PromptRenderer(DataConfig(chat_template=True), tokenizer)

    def __call__(self, text: str | Sequence[Mapping[str, Any]], where: str) -> list[int]:
        """Return the tokens of a text, or of a chat in the tokenizer's template.

        `where` is the field of errors. Raises InvalidValue.
        """
        require(
            isinstance(text, str | list | tuple),
            where,
            text,
            rule="must be a text or a list of messages",
            fix="Return one of them from ask.",
        )
        if not isinstance(text, str):
            return self._encode_chat(text, where)
        require(text != "", where, rule="is empty", fix="Return a text from ask.")
        check_encodable(text, where, change=ASKED)
        self.boundary.alphabet.check(text, where, change=ASKED)
        (token_ids,) = self.boundary.encode_prompts([text], with_opening=True)
        return token_ids

    def _encode_chat(self, chat: Sequence[Mapping[str, Any]], where: str) -> list[int]:
        renderer = self._renderer
        if renderer is None:
            raise InvalidValue(
                where,
                rule="is a chat, but the judge's tokenizer has no chat template",
                fix="Return a text from ask, or use a judge with a chat template.",
            )
        messages = self._text.guarded(renderer.messages(chat, where))
        text = renderer.chat_text(messages, where, ending=ending_of(messages))
        return self._text.encode(text, after=None, cache={}, where=where, change=ASKED)


def score(stage: JudgeStage, reply: str) -> Verdict:
    """Return the score that `parse` finds in a reply, or the reason of a failure."""
    label, quoted = _label(stage, "parse", stage.parse), repr(reply[-QUOTED_CHARACTERS:])
    try:
        found: Any = stage.parse(reply)
    except BaseException as error:  # noqa: BLE001 - as in `question`
        return failure_from(stage.writes[0].name, error, label)
    if found is None:
        message = (
            f"{label}: no score in a reply that ends {quoted}. Ask for another form, raise "
            f"max_tokens={stage.max_tokens}, or use a judge that follows instructions better."
        )
        return _failure(stage, "reply", message)
    number = number_of(found)
    if number is None:
        message = f"{label} returned {reprlib.repr(found)}, which is no number. Return a float."
        return _failure(stage, "type", message)
    if not is_usable(number):
        message = (
            f"{label} returned {number} for a reply that ends {quoted}. Return finite numbers."
        )
        return _failure(stage, "nan", message)
    return number


def _label(stage: JudgeStage, name: str, function: object) -> str:
    return f"judge {stage.model.name!r}, {name} {name_of(function)}"


def _failure(stage: JudgeStage, kind: FailureKind, message: str) -> RewardFailure:
    return RewardFailure(kind=kind, reward=stage.writes[0].name, message=printable(message))
