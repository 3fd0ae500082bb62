"""Parsing of tool calls: round trips of templates, and errors for malformed calls."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

import rlsys
from rlsys.environments.tools.tool_call import ToolCall
from rlsys.environments.tools.tool_formats import FORMATS, MAX_CALLS_READ, detect, tool_format
from rlsys.environments.tools.tool_use import ToolUse
from rlsys.environments.tools.tools import MAX_CALLS
from tests.errors import invalid
from tests.tiers import examples

# How the models' own templates write calls, without all the rest of them.
HERMES = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}{# tools #}"""
QWEN3_CODER = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}

<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments | items %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}{% endfor %}{# tools #}"""
LLAMA3 = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ "; " if not \
loop.first }}{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}\
{% endfor %}{% endfor %}{# tools #}"""
PYTHON_TAG = LLAMA3.replace("{% for c in", "{{ '<|python_tag|>' if m.tool_calls }}{% for c in")
MISTRAL = """{% for m in messages %}{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS] [\
{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": \
{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ ", " if not loop.last else "]" }}\
{% endfor %}{% endif %}{% endfor %}{# tools #}"""
MISTRAL_V11 = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}\
[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}\
{# tools #}"""
TEMPLATES = {
    "hermes": [HERMES],
    "qwen3_coder": [QWEN3_CODER],
    "llama3": [LLAMA3, PYTHON_TAG],
    "mistral": [MISTRAL, MISTRAL_V11],
}
PAIRS = [(name, template) for name, all in TEMPLATES.items() for template in all]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(['"}', "</tool_call>", "[TOOL_CALLS]", "{{{", "<|python_tag|>", "}]", "\\"]),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,16}", fullmatch=True)
ARGUMENTS = st.dictionaries(NAMES, JSON, max_size=4)


def call_messages(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"abcdef{n:03d}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for n, (name, arguments) in enumerate(calls)
    ]


def rendered(template: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return the text of an assistant message that follows a user message."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "SENTINEL"},
        {"role": "assistant", "content": content, "tool_calls": call_messages(calls)},
    ]
    [text], _ = render_jinja_template(
        conversations=[messages], chat_template=template, tools=None, bos_token="", eos_token=""
    )
    return str(text.partition("SENTINEL")[2])


def as_pairs(calls: tuple[ToolCall, ...]) -> list[tuple[str, Any]]:
    assert not any(call.error for call in calls), calls
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(("name", "template"), [pair for pair in PAIRS if pair[0] != "qwen3_coder"])
@settings(max_examples=examples(60), deadline=None)
@given(
    calls=st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3),
    content=st.sampled_from(["", "Let me see.", "é {not} a [call]"]),
)
def test_calls_that_a_template_renders_are_parsed(
    name: str, template: str, calls: list[tuple[str, dict[str, Any]]], content: str
) -> None:
    reply = tool_format(name).parse(rendered(template, content, calls))
    assert as_pairs(reply.calls) == calls
    assert reply.content == content


TAGS = ("<parameter=", "</parameter>", "</function>", "<function=", "<tool_call>", "</tool_call>")


@settings(max_examples=examples(200), deadline=None)
@given(
    texts=st.dictionaries(NAMES, st.text() | st.sampled_from(["12", "null", "true", "{"])),
    others=st.dictionaries(NAMES, JSON.filter(lambda one: not isinstance(one, str))),
    content=st.sampled_from(["", "Let me see."]),
)
def test_xml_is_parsed_by_the_schema(
    texts: dict[str, str], others: dict[str, Any], content: str
) -> None:
    texts = {f"t_{name}": text for name, text in texts.items() if not any(t in text for t in TAGS)}
    arguments = {**texts, **others}
    properties = {name: {"type": "string"} for name in texts}
    schema = {"function": {"name": "f", "parameters": {"properties": properties}}}
    text = rendered(QWEN3_CODER, content, [("f", arguments), ("f", {})])
    if any(tag in json.dumps(others) for tag in TAGS):
        return  # this format cannot quote its own tags
    reply = tool_format("qwen3_coder").parse(text, [schema])
    assert as_pairs(reply.calls) == [("f", arguments), ("f", {})]
    assert reply.content == content


def test_xml_values_have_the_types_of_the_schema() -> None:
    properties = {
        "text": {"type": "string"},
        "maybe": {"type": "string", "nullable": True},
        "mode": {"enum": ["1", "2"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
        "is_new": {"type": "boolean"},
        "of": {"type": "object"},
    }
    values = {
        "text": "12",
        "maybe": "null",
        "mode": "1",
        "either": "None",
        "count": " 12 ",
        "is_new": "True",
        "of": '{"a": [1]}',
        "unknown": "no JSON {",
    }
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    reply = FORMATS["qwen3_coder"].parse(
        f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>",
        [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}],
    )
    assert as_pairs(reply.calls) == [
        (
            "f",
            {
                "text": "12",
                "maybe": None,
                "mode": "1",
                "either": None,
                "count": 12,
                "is_new": True,
                "of": {"a": [1]},
                "unknown": "no JSON {",
            },
        )
    ]


def test_a_tag_within_a_value_is_kept_where_it_ends_nothing() -> None:
    text = "<function=f>\n<parameter=x>\na</parameter> b\n</parameter>\n</function>"
    assert as_pairs(FORMATS["qwen3_coder"].parse(text).calls) == [("f", {"x": "a</parameter> b"})]


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize(
    "text", ["", "Just text.\n", "a {set} of [lists], <b>bold</b>", "{}", "[]"]
)
def test_a_reply_without_calls_is_its_text(name: str, text: str) -> None:
    reply = tool_format(name).parse(text)
    assert (reply.content, reply.calls) == (text, ())


MALFORMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', "invalid JSON"),
    ("hermes", "<tool_call>f(1)</tool_call>", "invalid JSON"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name"'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "JSON object"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "JSON object"),
    ("hermes", '<tool_call>{"name": "f"} and more</tool_call>', "one JSON object"),
    ("hermes", '<tool_call>{"name": "f", "argum', "invalid JSON"),
    ("hermes", "<tool_call>[1]</tool_call>", "object"),
    ("hermes", "<tool_call>" + '{"a":' * 100_000, "nested too deeply"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "invalid JSON"),
    ("qwen3_coder", "<tool_call><function=>x</function></tool_call>", "<function="),
    ("qwen3_coder", "<function=f>{}</function>", "<parameter=NAME>"),
    ("llama3", '{"name": "f", "parameters": {"x": }}', "invalid JSON"),
    ("llama3", "<|python_tag|>print(1)", "invalid JSON"),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {', "invalid JSON"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}', "invalid JSON"),
    ("mistral", "[TOOL_CALLS]f[ARGS]x=1", "invalid JSON"),
    ("mistral", "[TOOL_CALLS]", "invalid JSON"),
    ("json", '{"name": "f", "arguments": {"x": 1}', "invalid JSON"),
    ("json", '{"name": "f", "arguments": 1}', "JSON object"),
]


@pytest.mark.parametrize(("name", "text", "reason"), MALFORMED)
def test_a_malformed_call_has_an_error(name: str, text: str, reason: str) -> None:
    [call] = tool_format(name).parse(text).calls
    assert reason in call.error
    assert call.arguments == {}
    assert len(call.error) < 500
    assert ToolCall.of(json.loads(json.dumps(call.message))) == call


def test_the_error_of_a_malformed_call_is_its_tool_message() -> None:
    calls = []

    @rlsys.tool
    def f(name: str = "", arguments: list[int] | None = None) -> str:
        calls.append(name)
        return "called"

    @rlsys.environment(tools=[f])
    async def play(chat: Any, task: Any) -> float:
        return 0.0

    tools = ToolUse(play, HERMES, asyncio.to_thread)
    good = '<tool_call>{"name": "f", "arguments": {"name": "once"}}</tool_call>'
    bad = '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'
    message = {"role": "assistant", "content": f"Now. {bad}{good}"}
    tools.split_calls(message, num_before=4)
    assert message["content"] == "Now."
    answers = asyncio.run(tools.call_all(message["tool_calls"]))  # type: ignore[arg-type]
    assert answers[0]["content"].startswith("Error: ")
    assert '"arguments": [1]' in answers[0]["content"]  # the quoted call
    assert [one["tool_call_id"] for one in answers] == ["call00004", "call00005"]
    assert answers[1]["content"] == "called"
    assert calls == ["once"]


def test_a_malformed_call_does_not_hide_the_next() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reply = FORMATS["hermes"].parse(f"a<tool_call>oh</tool_call>b{good}c")
    assert [bool(call.error) for call in reply.calls] == [True, False]
    assert reply.content == "a\nb\nc"


def test_text_around_calls_is_content() -> None:
    text = 'One.\n{"name": "f", "parameters": {"x": 1}}\nTwo.'
    for name in ("llama3", "json"):
        reply = FORMATS[name].parse(text)
        assert as_pairs(reply.calls) == [("f", {"x": 1})]
        assert reply.content == "One.\nTwo."
    reply = FORMATS["json"].parse('{"a": 1} [{"name": "f", "arguments": {}}] {')
    assert (reply.content, as_pairs(reply.calls)) == ('{"a": 1}\n{', [("f", {})])


def test_ids_go_on_through_an_episode() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "id": "ABCdef123"}]'
    reply = FORMATS["mistral"].parse(text, num_before=12)
    assert [call.id for call in reply.calls] == ["call00012", "ABCdef123"]
    assert reply.tool_calls[0] == {
        "id": "call00012",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }
    assert ToolCall.of(reply.tool_calls[0]) == ToolCall("call00012", "f", {})


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<function=f>",
    "</function>",
    "<parameter=x>",
    "</parameter>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    '{"name":"f","arguments":{}}',
    '{"name":',
    "{",
    "}",
    '"',
    "[",
    "]",
    ";",
    ",",
    "f",
    "1",
]


@pytest.mark.parametrize("name", list(FORMATS))
@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from(PIECES)))
def test_nothing_that_a_model_writes_raises(name: str, pieces: list[str]) -> None:
    reply = tool_format(name).parse("".join(pieces))
    for call in reply.calls:
        assert call.error or call.name
        ToolCall.of(call.message)


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize(
    "piece",
    [*PIECES, '{"a":', "<tool_call> ", "[ ", "; ", "<parameter= "],
)
def test_long_nonsense_takes_linear_time(name: str, piece: str) -> None:
    begin = time.monotonic()
    tool_format(name).parse(piece * (200_000 // len(piece)))
    assert time.monotonic() - begin < 2


def test_a_reply_of_nothing_but_calls_is_read_to_a_bound() -> None:
    reply = FORMATS["mistral"].parse("[TOOL_CALLS]f[ARGS]{}" * 1000)
    assert len(reply.calls) == MAX_CALLS_READ > MAX_CALLS


def test_the_format_is_found_in_the_template() -> None:
    for name, template in PAIRS:
        is_newer = name == "mistral" and "[ARGS]" in template
        assert detect(template).name == ("mistral_args" if is_newer else name)
    assert detect(None).name == "json"


def test_templates_without_a_known_format() -> None:
    with invalid("tools"):
        detect("{% for m in messages %}{{ m.content }}{% endfor %}")
    with invalid("tool_format") as found:
        detect("{{ tools }}<|channel|>")
    assert "hermes" in found.value.fix
    with invalid("tool_format"):
        detect("{{ tools }}<tool_call>f<arg_key>x</arg_key>")
    with invalid("tool_format", "pythonic"):
        tool_format("pythonic")


PUBLISHED = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
}


@pytest.mark.parametrize(("model", "name"), PUBLISHED.items())
@settings(max_examples=examples(60), deadline=None)
@given(arguments=ARGUMENTS)
def test_calls_of_published_templates_are_parsed(
    model: str, name: str, arguments: dict[str, Any]
) -> None:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    template = (Path(spec.origin).parent / "chat_templates" / f"{model}.jinja").read_text()
    assert detect(template).name == name
    if name == "qwen3_coder" and any(tag in json.dumps(arguments) for tag in TAGS):
        return
    texts = {k: {"type": "string"} for k, v in arguments.items() if isinstance(v, str)}
    schema = {"function": {"name": "f", "parameters": {"properties": texts}}}
    reply = detect(template).parse(rendered(template, "", [("f", arguments)]), [schema])
    assert as_pairs(reply.calls) == [("f", arguments)]
