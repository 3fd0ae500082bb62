"""Options of chat templates, and the endings of a chat."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from rlsys.config import DataConfig, RunConfig, SamplingConfig
from rlsys.data.prompts import PromptSource
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.conversation import Conversation
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.runs.observe.configuration_advice import configuration_warnings
from rlsys.text.chat_template import Ending, parse_options, render_chat, set_template_options
from tests.errors import invalid
from tests.text.families import FAMILIES

USER = {"role": "user", "content": "Hi"}
QUIET = "<think>\n\n</think>\n\n"


@pytest.fixture
def qwen() -> Any:
    return FAMILIES["qwen3"].tokenizer()


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        ((), {}),
        (("enable_thinking=false",), {"enable_thinking": False}),
        (("effort=high", "budget=12"), {"effort": "high", "budget": 12}),
        (('date="26 Jul 2024"', "formula=a=b"), {"date": "26 Jul 2024", "formula": "a=b"}),
    ],
)
def test_an_option_is_json_or_text(texts: tuple[str, ...], options: dict[str, Any]) -> None:
    assert parse_options(texts, "x") == options


@pytest.mark.parametrize("texts", [("enable_thinking",), ("=1",), ("a b=1",), ("a=1", "a=2")])
def test_an_option_needs_a_name_that_no_other_option_has(texts: tuple[str, ...]) -> None:
    with invalid("x", list(texts)):
        parse_options(texts, "x")


def test_an_option_that_the_template_does_not_use_is_refused(qwen: Any) -> None:
    with invalid("data.template_options", ["enable_thnking=false"]):
        set_template_options(qwen, ["enable_thnking=false"], "data.template_options")


def test_options_apply_to_prompts_and_episodes_and_are_pickled(
    qwen: Any,
) -> None:
    set_template_options(qwen, ["enable_thinking=false"], "data.template_options")
    again = pickle.loads(pickle.dumps(qwen))
    prompts = PromptSource(
        DataConfig(chat_template=True, template_options=("enable_thinking=false",)),
        again,
        seed=0,
        max_tokens=9,
        max_context=999,
        rows=[{"prompt": "Hi"}],
    )
    path = Conversation(Codec(again)).prompt([USER])
    assert prompts.at(0).text.endswith(f"assistant\n{QUIET}")
    assert path.token_ids == list(prompts.at(0).token_ids)


def test_options_without_a_template_are_refused(qwen: Any) -> None:
    with invalid("data.template_options", ["enable_thinking=false"]):
        PromptSource(
            DataConfig(template_options=("enable_thinking=false",)),
            qwen,
            seed=0,
            max_tokens=9,
            max_context=999,
            rows=[{"prompt": "Hi"}],
        )


def test_the_three_endings_of_a_chat(qwen: Any) -> None:
    begun = {"role": "assistant", "content": "im_end, then "}
    start = "<|im_start|>user\nHi<|im_end|>\n"
    assert render_chat(qwen, [USER]) == f"{start}<|im_start|>assistant\n"
    assert render_chat(qwen, [USER], ending=Ending.CLOSED) == start
    continued = render_chat(qwen, [USER, begun], ending=Ending.CONTINUED)
    assert continued == f"{start}<|im_start|>assistant\n{QUIET}im_end, then "


@pytest.mark.parametrize(
    ("stop", "names"), [("\\n", "line break"), ("a\\t", "tab"), ("\n", None), ("\\boxed", None)]
)
def test_a_backslash_that_no_shell_has_read_is_warned_of(stop: str, names: str | None) -> None:
    warnings = configuration_warnings(RunConfig(sampling=SamplingConfig(stop=(stop,))))
    assert len(warnings) == (names is not None)
    assert all(names is not None and names in one for one in warnings)


def test_a_template_that_needs_text_arguments_gets_text() -> None:
    """DeepSeek-V3's template needs text; other templates get an object."""
    tokenizer = build_tokenizer()
    loop = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    end = "{% endfor %}{% endfor %}"
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer.chat_template = loop + "{{ 'args ' + c.function.arguments }}" + end
    assert render_chat(tokenizer, messages, ending=Ending.CLOSED) == 'args {"a": 1}'
    tokenizer.chat_template = loop + "{{ c.function.arguments.a }}" + end
    assert render_chat(tokenizer, messages, ending=Ending.CLOSED) == "1"
