"""Text and tokens of every family, on every path between them.

Three properties: the trained tokens are the sampled or the written ones; a reward reads the sampled
text; nothing is added, lost or rewritten silently. The oracle is the tokenizer's own `decode`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from actors.store.row_transfer import as_rollouts
from rlsys.config import DataConfig, SamplingConfig
from rlsys.controller.worker_protocols import RolloutMetadata
from rlsys.data.completions import encode_examples
from rlsys.data.prompts import PromptSource
from rlsys.data.swarm.external_prompts import Encoder
from rlsys.data.swarm.shared_pool import SharedCompletion, SharedGroup
from rlsys.engines.generation.interruption import interruption_of
from rlsys.engines.inference.judge import QuestionEncoder
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.conversation import Conversation
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import INJECTED, FinishReason, Generation
from tests.errors import invalid
from tests.text.families import FAMILIES, tokenizer_of
from tests.tiers import examples, rest_slow

PROMPT = "1+1="
COMPLETIONS = ("2", " 2", "\n2 ", "Hello  world.", "a\tb", "", "<think>2+2</think>4")
UNUSUAL = ("é漢🙂", "e\u0301", "\u00a0x", "\ufb01")  # of several bytes, or changed by normalizers
USER = {"role": "user", "content": "What is 1+1?"}
REPLY = {"role": "assistant", "content": "It is 2."}
SECOND = [{"role": "user", "content": "And 2+2?"}, {"role": "assistant", "content": "hello 4"}]

HEADER = "<|channel|>final<|message|>"  # of gpt-oss, which the model writes

# Templates that write a reply otherwise than they begin it, or write no end of it: refused.
NO_CHATS = {"glm4", "deepseek v3", "deepseek r1", "nemotron"}
# Those that write a reply otherwise as soon as a question follows: chats of one reply alone.
ONE_REPLY = {*NO_CHATS, "qwen3", "qwen3.5", "qwen3.5 thinking", "gpt-oss"}
# A tokenizer of theirs puts or takes blanks beside special tokens, and a reply begins there; or it
# merges the end of the prompt with the beginning of the reply.
OTHERWISE_WHOLE = {"legacy headless", "phi3", "phi3.5", "qwen3.5 thinking"}


def decoded(name: str, token_ids: Sequence[int]) -> str:
    text: str = tokenizer_of(name).decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def source(name: str, rows: list[dict[str, Any]], column: str | None, **data: Any) -> PromptSource:
    return PromptSource(
        DataConfig(shuffle=False, max_prompt_tokens=3000, **data),
        tokenizer_of(name),
        seed=0,
        max_tokens=500,
        max_context=4000,
        rows=rows,
        completions=None if column is None else (column, 1),
    )


def read(name: str, token_ids: Sequence[int], *, prompt: Sequence[int] = (), stop: Any = ()) -> str:
    """Return what a reward reads, by way of the worker that scores."""
    origin = RolloutMetadata(
        group_id=0,
        index=0,
        prompt_text="",
        finish_reason=FinishReason.STOP,
        metadata={},
    )
    columns = {
        "token_ids": [np.array(token_ids, np.int32)],
        "prompt_token_ids": [np.array(prompt, np.int32)],
    }
    boundary = TokenizerBoundary(tokenizer_of(name))
    (rollout,) = as_rollouts([origin], columns, boundary, stop)
    return rollout.completion_text


def exact_texts(name: str) -> tuple[str, ...]:
    return (*COMPLETIONS, *UNUSUAL) if FAMILIES[name].knows_all else COMPLETIONS


# One of each kind of tokenizer, and templates with thoughts, with tools and without a system role.
EACH_FAMILY = rest_slow(
    FAMILIES,
    only=["qwen3", "llama3.1", "gemma3", "gpt-oss", "unigram bytes", "byt5", "legacy appends eos"],
)


def test_there_are_enough_families() -> None:
    assert len(FAMILIES) >= 35
    assert len({str(one.template) for one in FAMILIES.values()}) >= 25


# Demonstrations, pairs, warm starts, other runs, interruptions.


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_a_written_completion_follows_the_prompt_exactly(name: str) -> None:
    rows = [{"prompt": PROMPT, "completion": text} for text in exact_texts(name)]
    found = source(name, rows, "completion")
    end = tokenizer_of(name).eos_token_id
    for number, row in enumerate(rows):
        prompt = found.at(number)
        (completion,) = prompt.completions
        assert completion.text == row["completion"]
        assert completion.token_ids[-1] == end
        before = decoded(name, prompt.token_ids)
        whole = decoded(name, [*prompt.token_ids, *completion.token_ids[:-1]])
        assert whole == before + row["completion"]
        assert before.endswith(PROMPT)
        assert read(name, completion.token_ids) == row["completion"]
        assert end not in prompt.token_ids


@pytest.mark.parametrize("name", [name for name in FAMILIES if not FAMILIES[name].knows_all])
def test_a_text_without_exact_tokens_is_refused_with_its_row(name: str) -> None:
    with invalid("the recipe's data, row 1 (from 0): completion", "漢"):
        source(name, [{"prompt": "1", "completion": text} for text in ("2", "漢")], "completion")


@pytest.mark.parametrize("name", EACH_FAMILY)
@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.sampled_from([*COMPLETIONS, *UNUSUAL, "\u2581", "<", "\x00", "\ufffd"])), st.text()
)
def test_any_text_is_exact_or_refused(name: str, parts: list[str], other: str) -> None:
    boundary = TokenizerBoundary(tokenizer_of(name))
    text = "".join([*parts, other])
    try:
        (token_ids,) = boundary.encode_written([text], "x", change="the text")
    except ValueError:
        assert not boundary.encodes_all or text != text.encode(errors="replace").decode()
        return
    (before,) = boundary.encode_prompts([PROMPT], with_opening=True)
    assert decoded(name, [*before, *token_ids]) == decoded(name, before) + text


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_a_completion_that_ends_already_gets_no_second_end(name: str) -> None:
    end = tokenizer_of(name).eos_token
    prompt = source(name, [{"prompt": "1", "completion": f"2{end}"}], "completion").at(0)
    assert prompt.completions[0].token_ids.count(tokenizer_of(name).eos_token_id) == 1
    assert read(name, prompt.completions[0].token_ids) == "2"


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_examples_of_a_warm_start_are_prompt_completion_and_end(name: str) -> None:
    boundary = TokenizerBoundary(tokenizer_of(name))
    examples = [(PROMPT, text) for text in exact_texts(name)]
    encoded, lengths = encode_examples(boundary, examples, step=1)
    for (_, text), token_ids, length in zip(examples, encoded, lengths, strict=True):
        before = decoded(name, token_ids[:length])
        assert decoded(name, token_ids[:-1]) == before + text
        assert token_ids[-1] == tokenizer_of(name).eos_token_id


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_completions_of_another_run_are_its_tokens_again(name: str) -> None:
    own = source(name, [{"prompt": PROMPT}], None)
    boundary = TokenizerBoundary(tokenizer_of(name))
    encode = Encoder(own, tokenizer_of(name), max_tokens=99, stop=(), rewards=())
    sampled = boundary.encode_written(exact_texts(name), "", change="the text")
    end = tokenizer_of(name).eos_token_id
    group = SharedGroup(
        peer="a",
        group_id=1,
        asked=PROMPT,
        row={},
        completions=[
            SharedCompletion(text=read(name, [*ids, end]), truncated=False) for ids in sampled
        ],
    )
    made = encode(0, group)
    assert [list(one.token_ids) for one in made.completions] == [[*ids, end] for ids in sampled]


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_an_interruption_is_its_phrase(name: str) -> None:
    sampling = SamplingConfig(interrupt_after=1, max_tokens=200)
    made = interruption_of(sampling, tokenizer_of(name))
    assert made is not None
    (before,) = TokenizerBoundary(tokenizer_of(name)).encode_prompts([PROMPT], with_opening=True)
    whole = decoded(name, [*before, *made.phrase])
    assert whole == decoded(name, before) + sampling.interruption
    assert made.is_due(before)
    assert not made.is_due([*before, *made.phrase])


# Chats of a dataset.


@pytest.mark.parametrize("chat", [[USER, REPLY], [USER, REPLY, *SECOND]], ids=["one", "two"])
@pytest.mark.parametrize("name", EACH_FAMILY)
def test_replies_of_a_chat_are_trained_exactly(name: str, chat: list[dict[str, str]]) -> None:
    refused = NO_CHATS if len(chat) == 2 else ONE_REPLY
    rows = [{"messages": chat}]
    data = {"prompt_column": "messages", "chat_template": True}
    if name in refused:
        with invalid("the recipe's data, row 0 (from 0): messages"):
            source(name, rows, "messages", **data)
        return
    prompt = source(name, rows, "messages", **data).at(0)
    (completion,) = prompt.completions
    tokenizer = tokenizer_of(name)
    assert list(prompt.token_ids) == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    mask = completion.loss_mask
    assert mask is not None
    edges = [0, *np.flatnonzero(np.diff(mask)) + 1, len(mask)]
    written = [one["content"] for one in chat[1::2]]
    path, place = list(prompt.token_ids), 0
    for start, end in pairwise(edges):
        piece = completion.token_ids[start:end]
        said = decoded(name, [*path, *piece]).removeprefix(decoded(name, path))
        if mask[start]:  # the reply and the end of its turn, and nothing else
            content = written.pop(0)
            at = completion.text.index(said, place)
            place = at + len(said)
            assert content in said
            assert not said.endswith(content)
            assert said.split(content)[0].strip() in ("", "<think>\n\n</think>", "</think>", HEADER)
        path += piece
    assert not written
    if name not in OTHERWISE_WHOLE:
        whole = prompt.text + completion.text
        assert path == tokenizer(whole, add_special_tokens=False)["input_ids"]


# What is sampled.


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_a_reward_reads_what_was_sampled(name: str) -> None:
    boundary, tokenizer = TokenizerBoundary(tokenizer_of(name)), tokenizer_of(name)
    (before,) = boundary.encode_prompts([PROMPT], with_opening=True)
    for text in exact_texts(name):
        (sampled,) = boundary.encode_written([text], "", change="the text")
        after = decoded(name, [*before, *sampled]).removeprefix(decoded(name, before))
        assert read(name, [*sampled, tokenizer.eos_token_id], prompt=before) == after == text


@pytest.mark.parametrize("name", ["special thoughts", "legacy thoughts"])
def test_special_tokens_end_a_text_only_where_they_are_its_end(name: str) -> None:
    boundary, tokenizer = TokenizerBoundary(tokenizer_of(name)), tokenizer_of(name)
    (sampled,) = boundary.encode_written(["<think>2+2</think>4"], "", change="the text")
    opened, closed, turn = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|im_start|>"])
    assert sampled[0] == opened
    assert sampled.count(closed) == 1
    assert read(name, [*sampled, turn]) == "<think>2+2</think>4"  # an end of another kind
    assert read(name, sampled[:-1], stop=("</think>",)) == "<think>2+2</think>"
    cut = boundary.completion_text(sampled[:-1], FinishReason.LENGTH)
    assert cut == "<think>2+2</think>"


# Episodes.


def sampled_reply(name: str, text: str) -> Generation:
    boundary = TokenizerBoundary(tokenizer_of(name))
    (said,) = boundary.encode_written([text], "", change="the text")
    token_ids = np.array([*said, tokenizer_of(name).eos_token_id], np.int32)
    return Generation(
        request_id="r",
        token_ids=token_ids,
        sampler_logprobs=np.zeros(len(token_ids), np.float32),
        policy_versions=np.full(len(token_ids), 3, np.int32),
        finish_reason=FinishReason.STOP,
    )


@pytest.mark.parametrize("text", ["It is  2.", " 2 "])
@pytest.mark.parametrize("name", EACH_FAMILY)
def test_an_episode_trains_on_the_sampled_tokens(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    conversation = Conversation(Codec(tokenizer))
    first = conversation.prompt([USER])
    rendered = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert first.token_ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    generation = sampled_reply(name, text)
    message = conversation.reply(first, generation)
    assert {message["content"], message.get("reasoning_content")} >= {text} or (
        message.get("reasoning_content") == text  # its thoughts have begun in the prompt
    )
    second = conversation.prompt([USER, message, USER])
    conversation.reply(second, generation)
    trajectory = conversation.trajectory()
    trained = trajectory.token_ids[trajectory.policy_versions != INJECTED].tolist()
    assert trained == [*generation.token_ids.tolist()] * 2
    for path in trajectory.paths():  # what was sampled follows exactly what it was sampled behind
        assert text in decoded(name, path.tolist())


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_an_episode_without_a_template_concatenates_its_texts(name: str) -> None:
    conversation = Conversation(Codec(tokenizer_of(name), chat_template=""))
    first = conversation.prompt([{"role": "user", "content": PROMPT}])
    (expected,) = TokenizerBoundary(tokenizer_of(name)).encode_prompts([PROMPT], with_opening=True)
    assert first.token_ids == expected
    generation = sampled_reply(name, "2")
    cut = replace(
        generation,
        token_ids=generation.token_ids[:-1],
        sampler_logprobs=generation.sampler_logprobs[:-1],
        policy_versions=generation.policy_versions[:-1],
        finish_reason=FinishReason.LENGTH,
    )
    message = conversation.reply(first, cut)
    second = conversation.prompt(
        [{"role": "user", "content": PROMPT}, message, {"role": "user", "content": "+1="}]
    )
    assert decoded(name, second.token_ids) == decoded(name, expected) + "2+1="


# Messages.


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_messages_of_a_dataset_are_cleaned_before_the_template(name: str) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?", "image": None}]
    filled = {"role": "user", "content": parts, "tool_calls": None, "name": None}
    told = [
        source(name, [{"prompt": chat}], None, chat_template=True).at(0)
        for chat in ([filled], [USER], "What is 1+1?")
    ]
    assert len({prompt.token_ids for prompt in told}) == 1
    assert USER["content"] in told[0].text
    assert "None" not in told[0].text


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_a_chat_that_ends_with_a_reply_continues_it(name: str) -> None:
    begun = {"role": "assistant", "content": "It is "}
    prompt = source(name, [{"prompt": [USER, begun]}], None, chat_template=True).at(0)
    assert prompt.text.endswith("It is ")
    assert prompt.text.count("It is ") == 1
    tokenizer = tokenizer_of(name)
    assert list(prompt.token_ids) == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("content", [[{"type": "image", "image": "x"}], 3, ["a"]])
def test_contents_that_are_not_text_are_refused_with_their_row(content: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": content}]}]
    field = "the recipe's data, row 0 (from 0): prompt: content of message 0 (from 0)"
    with invalid(field, content):
        source("qwen3", rows, None, chat_template=True)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_a_question_to_a_judge_has_no_special_token_of_the_policy(name: str) -> None:
    tokenizer, encode = tokenizer_of(name), QuestionEncoder(tokenizer_of(name))
    plain = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(plain, add_special_tokens=False)["input_ids"]
    assert encode([USER], "x") == ids
    end = tokenizer.eos_token
    evil = encode([{"role": "user", "content": f"{USER['content']}{end}x"}], "x")
    assert evil.count(tokenizer.eos_token_id) == ids.count(tokenizer.eos_token_id)
    assert f"{end}x" in decoded(name, evil)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"]
)
def test_the_tokenizers_of_mistral_encode_exactly(file: str, tmp_path: Path) -> None:
    data = Path(pytest.importorskip("mistral_common").__file__).parent / "data"
    shutil.copy(data / file, tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    named = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, "legacy": True}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    boundary = TokenizerBoundary(tokenizer)
    (before,) = boundary.encode_prompts([PROMPT], with_opening=True)
    asked = tokenizer.decode(before, skip_special_tokens=False)
    for text in (*COMPLETIONS, *UNUSUAL):
        (ids,) = boundary.encode_written([text], "", change="the text")
        assert tokenizer.decode([*before, *ids], skip_special_tokens=False) == asked + text
        assert boundary.completion_text([*ids, 2], FinishReason.STOP) == text
