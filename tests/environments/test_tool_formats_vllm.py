"""Calls in a reply, against the parsers of vLLM, which serve these models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.environments.tools.tool_formats import tool_format
from tests.tiers import examples

pytest.importorskip("vllm", reason="the parsers that are compared with")

PROPERTIES = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "l": {"type": "array"},
}
SCHEMA = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}},
}
UNTYPED = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
THEIRS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3": "llama3_json",
    "mistral": "mistral",
}


class Tokenizer:
    """Only the special tokens: vLLM's parsers ask for these."""

    def __init__(self) -> None:
        tags = "<tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] [ARGS] [CALL_ID]"
        thinking = "<think> </think> [THINK] [/THINK] [TOOL_CONTENT]"
        self.vocab = {tag: n + 1 for n, tag in enumerate(f"{tags} {thinking}".split())}
        self.all_special_tokens = list(self.vocab)
        self.all_special_ids = list(self.vocab.values())
        self.eos_token_id = 0

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def __len__(self) -> int:
        return len(self.vocab)

    def encode(self, *given: Any, **options: Any) -> list[int]:
        return [1]

    def decode(self, *given: Any, **options: Any) -> str:
        return ""

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.vocab.get(token, 0)


def theirs(
    name: str, text: str, schema: dict[str, Any] = SCHEMA
) -> tuple[str, list[tuple[str, Any]]]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}], model="m", tools=[schema]
    )
    parser = ToolParserManager.get_tool_parser(THEIRS[name])(Tokenizer(), request.tools)
    found = parser.extract_tool_calls(text, request)
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls]
    return (found.content or "").strip(), calls


def ours(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    reply = tool_format(name).parse(text, [SCHEMA])
    calls = [(call.name, dict(call.arguments)) for call in reply.calls if not call.error]
    return reply.content.strip(), calls


PARAMETERS = "".join(
    f"<parameter={name}>\n{value}\n</parameter>\n"
    for name, value in {"s": "12", "n": "12", "b": "true", "o": '{"a": [1]}', "l": "[1]"}.items()
)
SAME = [
    ("hermes", "Just text with {braces}."),
    ("hermes", 'Hm. <tool_call>\n{"name": "f", "arguments": {"s": "a"}}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}'),
    ("hermes", '<tool_call>{"arguments": {"s": "}"}, "name": "f"}</tool_call>' * 2),
    ("qwen3_coder", "Just text."),
    ("qwen3_coder", f"Hm.\n<tool_call>\n<function=f>\n{PARAMETERS}</function>\n</tool_call>"),
    ("qwen3_coder", f"<tool_call>\n<function=f>\n{PARAMETERS}</function>\n</tool_call>\n" * 2),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\na\n\nb\n</parameter>\n</function>"),
    ("llama3", "Just text."),
    ("llama3", '{"name": "f", "parameters": {"n": 1}}'),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"o": {"a": {"b": "}"}}}}'),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "f", "arguments": {"n": 2}}'),
    ("mistral", "Just text."),
    ("mistral", 'Hm.[TOOL_CALLS]f[ARGS]{"n": 1}'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "}"}[TOOL_CALLS]f{"n": 2}'),
]


@pytest.mark.parametrize(("name", "text"), SAME)
def test_the_same_is_read(name: str, text: str) -> None:
    assert ours(name, text) == theirs(name, text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from(list(PROPERTIES)), JSON)


def written(name: str, calls: list[dict[str, Any]]) -> str:
    texts = [json.dumps(one, ensure_ascii=False) for one in calls]
    match name:
        case "hermes":
            tag = '\n<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'
            return "".join(tag.format(one) for one in texts)
        case "llama3":
            return "; ".join(f'{{"name": "f", "parameters": {one}}}' for one in texts)
        case _:
            return "".join(f"[TOOL_CALLS]f[ARGS]{one}" for one in texts)


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
@settings(max_examples=examples(100), deadline=None)
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_the_same_is_read_of_any_json(name: str, calls: list[dict[str, Any]]) -> None:
    text = written(name, calls)
    # Given types, theirs converts Mistral's values to them as well.
    assert ours(name, text) == theirs(name, text, UNTYPED) == ("", [("f", one) for one in calls])


# Where theirs gives up on a reply, or takes one thing for another.
MORE = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>'),
    ("hermes", '<tool_call>oh</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ("llama3", 'The set {1, 2}: {"name": "f", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}]'),
]


@pytest.mark.parametrize(("name", "text"), MORE)
def test_calls_that_vllm_does_not_parse(name: str, text: str) -> None:
    assert [called for called, _ in ours(name, text)[1]] == ["f"]
    assert [called for called, _ in theirs(name, text)[1]] != ["f"]
