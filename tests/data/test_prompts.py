"""Prompts: their order, text and tokens, and rows without a prompt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import DataConfig
from rlsys.data.prompts import PromptSource, load_tokenizer
from rlsys.data.row_source import epoch_order
from rlsys.errors import NOT_GIVEN, InvalidValue
from rlsys.launcher.tiny_models import BOS, CHAT_TEMPLATE, build_tokenizer
from rlsys.rewards import exact_match, example_rollout, numeric_answer
from rlsys.types import Prompt
from tests.errors import invalid

GSM8K = Path(__file__).parents[2] / "recipes" / "data" / "gsm8k" / "train.jsonl"

TOKENIZER = build_tokenizer()  # one token per byte


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+{n}=", "answer": 2 * n} for n in range(count)]


def source(
    data: Sequence[Mapping[str, Any]] | None = None,
    *,
    seed: int = 0,
    prompts_per_step: int = 1,
    max_tokens: int = 10,
    max_context: int = 2048,
    tokenizer: Any = TOKENIZER,
    **config: Any,
) -> PromptSource:
    found = PromptSource(
        DataConfig(**config),
        tokenizer,
        seed=seed,
        max_tokens=max_tokens,
        max_context=max_context,
        rows=data,
    )
    found.check_size(prompts_per_step)
    return found


def refused(data: Sequence[Mapping[str, Any]], **options: Any) -> InvalidValue:
    with pytest.raises(InvalidValue) as error:
        source(data, **options)
    assert "\n" not in str(error.value)
    return error.value


def where(row: int, column: str = "prompt") -> str:
    return f"the recipe's data, row {row} (from 0): {column}"


def test_a_prompt_is_its_row() -> None:
    prompt = source(rows(3), shuffle=False).at(1)
    assert prompt == Prompt(
        index=1,
        token_ids=tuple(TOKENIZER("1+1=")["input_ids"]),
        text="1+1=",
        row=1,
        metadata={"answer": 2},
    )


def test_indices_count_over_the_run_and_epochs_repeat_the_rows() -> None:
    prompts = source(rows(3), shuffle=False)
    found = [prompts.at(index) for index in range(7)]
    assert [prompt.index for prompt in found] == list(range(7))
    assert [prompt.metadata["answer"] for prompt in found] == [0, 2, 4, 0, 2, 4, 0]


def test_each_epoch_has_every_row_once_in_its_own_order() -> None:
    prompts = source(rows(50))
    epochs = [tuple(prompts.at(50 * epoch + i).text for i in range(50)) for epoch in range(3)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(row["prompt"] for row in rows(50))
    assert len(set(epochs)) == 3


def test_the_order_depends_on_the_seed() -> None:
    def texts(seed: int) -> list[str]:
        prompts = source(rows(50), seed=seed)
        return [prompts.at(index).text for index in range(120)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


@given(st.integers(0, 10), st.integers(0, 30), st.integers(1, 20))
def test_a_prompt_does_not_depend_on_the_ones_before(seed: int, index: int, num_rows: int) -> None:
    replayed = source(rows(num_rows), seed=seed)
    texts = [replayed.at(earlier).text for earlier in range(index + 1)]
    assert source(rows(num_rows), seed=seed).at(index).text == texts[-1]


@pytest.mark.parametrize(
    ("other", "key", "value"),
    [(source(rows(21)), "num_prompts", 20), (source(rows(20), seed=1), "seed", 0)],
)
def test_another_order_is_not_resumed(other: PromptSource, key: str, value: int) -> None:
    with invalid(f"checkpoint: {key}", value):
        other.check_order(source(rows(20)).order)


def test_the_epochs_order_is_pinned() -> None:
    # Later versions must resume checkpoints of this one in the same order.
    assert epoch_order(0, 0, 8).tolist() == [2, 4, 3, 6, 5, 0, 1, 7]


def test_a_string_is_the_users_message_of_a_chat_template() -> None:
    prompts = source([{"prompt": "Hi"}], chat_template=True, system_prompt="Be brief.")
    assert prompts.at(0).text == "system: Be brief.\nuser: Hi\nassistant: "


def test_messages_are_rendered_by_the_chat_template() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    prompts = source([{"prompt": messages}], chat_template=True)
    assert prompts.at(0).text == "user: Hi\nassistant: Hello"  # the reply stays open
    prompts = source([{"prompt": [*messages, messages[0]]}], chat_template=True)
    assert prompts.at(0).text == "user: Hi\nassistant: Hello\nuser: Hi\nassistant: "


def test_special_tokens_are_added_to_plain_text_and_not_twice_to_a_chat() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer()
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos)]
    )
    tokenizer.chat_template = BOS + CHAT_TEMPLATE
    plain = source([{"prompt": "Hi"}], tokenizer=tokenizer).at(0)
    chat = source([{"prompt": "Hi"}], tokenizer=tokenizer, chat_template=True).at(0)
    assert plain.token_ids.count(bos) == chat.token_ids.count(bos) == 1
    assert plain.token_ids[0] == chat.token_ids[0] == bos
    # The added token counts: "Hi" fits in two tokens, but not with it.
    error = refused([{"prompt": "Hi"}], tokenizer=tokenizer, max_prompt_tokens=2)
    assert "at least 3" in error.fix


BYTES_10 = {"prompt": "é" * 5}


@pytest.mark.parametrize(
    ("data", "options", "field", "value"),
    [
        ([], {}, "the recipe's data", NOT_GIVEN),
        (rows(2), {"prompt_column": "question"}, "data.prompt_column", "question"),
        (rows(3), {"prompts_per_step": 4}, "prompts_per_step", 4),
        ([{"prompt": "a"}, {"prompt": None}], {}, where(1), None),
        ([{"prompt": "a"}, {"x": 1}], {}, where(1), None),
        ([{"prompt": 3}], {}, where(0), 3),
        ([{"prompt": ""}], {}, where(0), ""),
        ([{"prompt": [{"role": "user", "content": "a"}]}], {}, where(0), NOT_GIVEN),
        (rows(2), {"max_tokens": 14, "max_context": 14}, "sampling.max_tokens", 14),
        (
            [{"prompt": [{"role": "system", "content": "a"}]}],
            {"chat_template": True, "system_prompt": "b"},
            where(0),
            NOT_GIVEN,
        ),
        (
            [{"prompt": "a"}, BYTES_10, BYTES_10],
            {"max_prompt_tokens": 9, "skip_long_prompts": True, "prompts_per_step": 2},
            "prompts_per_step",
            2,
        ),
    ],
)
def test_rows_that_cannot_be_used_are_refused_at_the_start(
    data: list[dict[str, Any]], options: dict[str, Any], field: str, value: Any
) -> None:
    with invalid(field, value):
        source(data, **options)


@pytest.mark.parametrize("prompt", [3, [], [{"content": "a"}]])
def test_prompts_that_are_not_a_chat_are_refused_with_a_template(prompt: Any) -> None:
    with invalid(where(0), prompt):
        source([{"prompt": prompt}], chat_template=True)


def test_the_fix_of_a_long_prompt_is_the_option_that_limits_it() -> None:
    error = refused([{"prompt": "a"}, BYTES_10, BYTES_10], max_prompt_tokens=9)
    assert (error.field, error.value) == ("data.max_prompt_tokens", 9)
    assert "2 of 3 rows" in error.rule
    assert "row 1, from 0, with 10" in error.rule
    assert "at least 10" in error.fix
    error = refused([BYTES_10], max_tokens=5, max_context=14)
    assert (error.field, error.value) == ("sampling.max_tokens", 5)
    assert "at most 4," in error.fix  # 14 tokens of context less 10
    assert "shorter prompts" in refused([BYTES_10], max_tokens=5, max_context=10).fix


def test_a_template_is_needed_to_render_with_one() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    with invalid("data.chat_template", True):
        source(rows(1), tokenizer=tokenizer, chat_template=True)


def test_messages_that_the_template_refuses_are_named_with_their_row() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    error = refused(rows(1), tokenizer=tokenizer, chat_template=True)
    assert error.field == where(0)
    assert "no such role" in error.rule


def test_an_unknown_character_is_refused_with_its_row() -> None:
    data = [{"prompt": "1+2="}, {"prompt": "1 + 2="}]
    error = refused(data, tokenizer=build_tokenizer("0123456789+="))
    assert error.field == where(1)
    assert "' '" in error.rule
    assert "OwnModel.characters" in error.fix


def test_special_tokens_are_not_unknown_characters() -> None:
    prompts = source([{"prompt": "1<eos>2"}], tokenizer=build_tokenizer("0123456789"))
    assert prompts.at(0).token_ids == (4, 2, 5)


def test_rewards_decide_the_types_of_a_column() -> None:
    data: list[dict[str, Any]] = [{"prompt": "1+1=", "answer": value} for value in ("2", ["2"])]
    prompts = source(data)
    with invalid(where(1, "answer"), ["2"]):
        prompts.check_rewards([exact_match()])
    whole: list[dict[str, Any]] = [{"prompt": "1+1=", "answer": value} for value in ("2", 2)]
    source(whole).check_rewards([exact_match()])
    floats = source([{"prompt": "1+1=", "answer": 2.0}])
    floats.check_rewards([numeric_answer()])
    with invalid(where(0, "answer"), 2.0):
        floats.check_rewards([exact_match()])


def test_long_prompts_are_skipped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    data = [{"prompt": "aaaa"}, {"prompt": "aaa"}, {"prompt": "aaaaa"}, {"prompt": "b"}]
    with caplog.at_level(logging.WARNING):
        prompts = source(data, max_prompt_tokens=3, skip_long_prompts=True, shuffle=False)
    assert [prompts.at(index).text for index in range(3)] == ["aaa", "b", "aaa"]
    (warning,) = caplog.messages
    assert "prompts in 2 of 4 rows" in warning
    assert "row 0, from 0, with 4" in warning


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_exactly_the_prompts_that_fit_are_used(texts: list[str]) -> None:
    fitting = [text for text in texts if len(TOKENIZER(text)["input_ids"]) <= 4]
    data = [{"prompt": text} for text in texts]
    options = {"max_prompt_tokens": 4, "skip_long_prompts": True, "shuffle": False}
    if not fitting:
        assert refused(data, **options).field == "prompts_per_step"
        return
    prompts = source(data, **options)
    assert [prompts.at(index).text for index in range(len(prompts))] == fitting


def test_gsm8k_of_this_repository_with_its_chat_template() -> None:
    prompts = source(
        source=str(GSM8K), prompt_column="question", chat_template=True, prompts_per_step=400
    )
    assert len(prompts) == 400
    assert prompts.metadata_columns == ("answer",)
    prompt = prompts.at(0)
    assert prompt.text.startswith("user: ")
    assert "####" in prompt.metadata["answer"]
    assert bytes(TOKENIZER.decode(prompt.token_ids), "utf-8") == bytes(prompt.text, "utf-8")


def test_rows_may_be_a_dataset_object() -> None:
    import datasets

    prompts = source(datasets.Dataset.from_list(rows(4)), shuffle=False)
    assert prompts.metadata_columns == ("answer",)
    assert prompts.at(3).metadata == {"answer": 6}


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with invalid("model.path", str(tmp_path)):
        load_tokenizer(str(tmp_path))
    TOKENIZER.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("ab")["input_ids"] == TOKENIZER("ab")["input_ids"]


NESTED = {
    "extra_info": {"question": "1+1=", "index": 3},
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def test_a_prompt_column_may_be_a_dotted_path() -> None:
    prompt = source([NESTED], prompt_column="extra_info.question").at(0)
    assert prompt.text == "1+1="
    assert prompt.metadata == NESTED  # the column around the prompt stays as it is


@pytest.mark.parametrize("as_dataset", [False, True])
def test_rewards_read_dotted_paths(*, as_dataset: bool) -> None:
    import datasets

    rows = [NESTED, {**NESTED, "reward_model": {"style": "rule", "ground_truth": "3"}}]
    data = datasets.Dataset.from_list(rows) if as_dataset else rows
    prompts = source(data, prompt_column="extra_info.question", shuffle=False)
    reward = numeric_answer("reward_model.ground_truth")
    prompts.check_rewards([reward])
    assert reward(example_rollout("3", metadata=dict(prompts.at(1).metadata))) == 1.0
    field = "reward 'numeric_answer': column"
    for path in ("ground_truth", "reward_model.answer.ground_truth"):
        with invalid(field, path) as found:
            prompts.check_rewards([numeric_answer(path)])
        assert "reward_model.ground_truth" in found.value.fix
    with invalid(field, "reward_model.zz") as found:
        prompts.check_rewards([numeric_answer("reward_model.zz")])
    assert "['style', 'ground_truth']" in found.value.rule
    rows[1]["reward_model"] = {"style": "rule", "ground_truth": None}
    with invalid(field, "reward_model.ground_truth") as found:
        source(rows, prompt_column="extra_info.question").check_rewards([reward])
    assert "1 of 2 rows" in found.value.rule
    assert "row 1, from 0" in found.value.rule


def test_a_wrong_path_of_the_prompt_names_the_right_one() -> None:
    error = refused([NESTED], prompt_column="question")
    assert (error.field, error.value) == ("data.prompt_column", "question")
    assert "extra_info.question" in error.fix


@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize(
    ("path", "end"),
    [("extra.z", "['q']"), ("extra..q", "['q']"), ("l.a", "list"), ("l.0.a", "list")],
)
def test_a_path_that_leads_nowhere_names_where_it_ends(
    path: str, end: str, *, as_dataset: bool
) -> None:
    import datasets

    data = [{"extra": {"q": "1+1="}, "l": [{"a": "1"}]}] * 2
    error = refused(datasets.Dataset.from_list(data) if as_dataset else data, prompt_column=path)
    assert (error.field, error.value) == ("data.prompt_column", path)
    assert end in error.rule


@pytest.mark.parametrize(
    ("column", "filled", "empty"),
    [
        ("chat_template_kwargs", {"enable_thinking": False}, {"enable_thinking": None}),
        ("images", ["a.png"], []),
        ("image", "a.png", None),
    ],
)
def test_columns_that_would_be_ignored_are_refused(column: str, filled: Any, empty: Any) -> None:
    data = [{"prompt": "1", column: empty}, {"prompt": "2", column: empty}]
    assert source(data).at(0).text in "12"
    data[1] = {"prompt": "2", column: filled}
    assert column in refused(data).rule
