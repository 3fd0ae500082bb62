"""JSON Schemas for xgrammar: each text of their grammar is JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.common.json_schemas import compilable
from rlsys.common.structural_tags import structural_tag
from rlsys.engines.generation.constraint import Grammars
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.launcher.tiny_models import EOS, build_tokenizer
from rlsys.types import FinishReason
from tests.engines.structures import PROMPT
from tests.engines.torch_engine_harness import batch_of, build_model, request, run

xgrammar = pytest.importorskip("xgrammar")

TOKENIZER = build_tokenizer()
END = TOKENIZER.convert_tokens_to_ids(EOS)
COMPILER = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(TOKENIZER))

SHORT = {"type": "string", "maxLength": 4}
EXACT = {"type": "string", "minLength": 2, "maxLength": 2}
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "short": SHORT,
        "maxLength": EXACT,  # a name, not a keyword
        "ref": {"$ref": "#/$defs/short"},
        "any": {"anyOf": [EXACT, {"type": ["string", "null"], "maxLength": 3}]},
        "list": {"type": "array", "items": SHORT, "minItems": 2, "maxItems": 3},
        "pair": {"type": "array", "prefixItems": [EXACT, SHORT], "items": False, "minItems": 2},
        "map": {
            "type": "object",
            "propertyNames": {"maxLength": 2},
            "minProperties": 1,
            "maxProperties": 2,
        },
        "rest": {"type": "object", "additionalProperties": SHORT, "maxProperties": 2},
    },
    "additionalProperties": False,
    "$defs": {"short": SHORT},
}
NESTED["required"] = [name for name in NESTED["properties"] if name != "map"]


def tag(schema: Any, **options: Any) -> str:
    format = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1, **options}
    return structural_tag({"type": "sequence", "elements": [format]})


def accepts(structure: str, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(
        COMPILER.compile_structural_tag(structure), terminate_without_stop_token=True
    )
    return bool(matcher.accept_string(text) and matcher.is_terminated())


@pytest.mark.slow
def test_sampled_texts_are_json(tmp_path: Path) -> None:
    path = build_model(tmp_path, "qwen3")
    model = load_causal_lm(path, dtype="float32")
    grammars = Grammars(path, model.config.vocab_size)
    batch = batch_of(model, stop_token_ids=(END,), grammars=grammars)
    requests = [
        request(f"{name}{i}", PROMPT, seed=i, max_tokens=400, structure=tag(schema))
        for name, schema in [("short", SHORT), ("nested", NESTED)]
        for i in range(24)
    ]
    num_complete = 0
    for one in run(batch, requests).values():
        if one.finish_reason is FinishReason.STOP:
            json.loads(TOKENIZER.decode(one.token_ids.tolist()[:-1]))
            num_complete += 1
    assert num_complete > 24


@given(
    st.text(
        st.sampled_from("ab\u00e9\U0001d11e\x7f\u2028]") | st.characters(codec="utf-8"), max_size=6
    )
)
def test_lengths_count_characters(value: str) -> None:
    written = f'"{value}"'
    needs_escape = json.dumps(value, ensure_ascii=False) != written
    for least, most in [(0, 4), (2, 2), (3, 2000)]:
        structure = tag({"type": "string", "minLength": least, "maxLength": most})
        assert accepts(structure, written) == (not needs_escape and least <= len(value) <= most)
    structure = tag({"type": "string", "minLength": 3})
    assert accepts(structure, written) == (not needs_escape and len(value) >= 3)


@pytest.mark.parametrize(
    "schema",
    [
        {"maxLength": 4},
        {"minLength": 1},
        {"maxLength": 2**31 - 1},
        {"pattern": "^.*$|\u00e9"},
        {"pattern": "^[^\u00e9]*$"},
        {"pattern": "^[^\\\u00e9]*$"},
    ],
)
def test_characters_that_json_forbids_are_refused(schema: Any) -> None:
    structure = tag({"type": "string", **schema})
    assert accepts(structure, '"ab"')
    for character in [*map(chr, range(32)), '"']:
        assert not accepts(structure, f'"a{character}b"')


@pytest.mark.parametrize("num", [128, 300, 5000])
def test_long_strings(num: int) -> None:
    structure = tag({"type": "string", "minLength": num, "maxLength": num})
    assert accepts(structure, json.dumps("a" * num))
    assert not accepts(structure, json.dumps("a" * (num + 1)))


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [{"type": "string", "maxLength": 4}]},
        {"const": {"maxLength": 4}},
        {"type": "string", "maxLength": -1},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "string", "maxLength": "x"},
        {"type": "string", "minLength": 0},
        {"type": "string", "pattern": "^a{2}$", "maxLength": 4},
        {"type": "object", "properties": {"maxLength": {"type": "integer"}}},
        True,
    ],
)
def test_other_schemas_are_kept(schema: Any) -> None:
    assert compilable(schema) == schema


def test_other_keywords_prevail() -> None:
    assert accepts(tag({"type": "string", "enum": ["abcdef"], "maxLength": 4}), '"abcdef"')
    assert accepts(tag({"type": ["string", "integer"], "maxLength": 4}), "12345")
    assert accepts(tag({"type": "string", "format": "date", "maxLength": 20}), '"2024-01-31"')


def test_arguments_in_xml_keep_their_characters() -> None:
    optional = {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}
    schema = {
        "type": "object",
        "properties": {"a": SHORT, "b": optional, "c": {"type": "array", "items": SHORT}},
        "required": ["a", "b", "c"],
    }
    structure = tag(schema, style="qwen_xml")
    text = "\n".join(f"<parameter={name}>\n%s\n</parameter>" for name in "abc")
    assert accepts(structure, text % ('a"\nb', '"', '["ab"]'))
    assert not accepts(structure, text % ('a"\nb', '"', '["a\x01b"]'))
