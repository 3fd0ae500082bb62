"""Text that is searched for stop strings, and tokens that end every completion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.engines.generation.stopping import (
    end_of_sequence_ids,
    stop_ids,
    text_after,
    text_decoder,
)
from rlsys.engines.generation.torch.slots import Slots
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import FinishReason, GenerationRequest, SamplingParams
from tests.text.families import tokenizer_of


def decode(token_ids: list[int]) -> str:
    """Decode like Llama 2 tokenizers: a text loses its leading space."""
    return "".join(map(chr, token_ids)).removeprefix(" ")


def ids(text: str) -> list[int]:
    return list(map(ord, text))


def test_text_decodes_in_its_context() -> None:
    assert decode(ids(" b")) == "b"
    assert text_after(decode, ids("a"), ids(" b")) == " b"
    assert text_after(decode, [], ids(" b")) == "b"
    assert text_after(decode, ids("a long prompt, of which the end is enough:"), ids(" b")) == " b"


def test_an_incomplete_first_character_does_not_hide_the_rest() -> None:
    def utf8(token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    umlaut = list("ä".encode())
    assert text_after(utf8, umlaut[:1], [umlaut[1], ord("b")]).endswith("b")


def test_a_stop_string_may_begin_with_the_first_tokens_space() -> None:
    slots = Slots(context=100, stop_token_ids=(), decode_text=decode)
    request = GenerationRequest(
        request_id="spaced",
        prompt_token_ids=ids("a"),
        sampling=SamplingParams(stop=(" b",), max_tokens=9),
        seed=0,
    )
    slots.add(request)
    reasons = []
    for token in ids(" b"):
        slots.record(np.array([0]), np.array([token]), np.zeros(1, np.float32), version=0)
        reasons.append(slots.ended(np.array([0])))
    assert reasons == [{}, {0: FinishReason.STOP}]


def test_tokens_of_a_request_end_it_besides_the_models_own() -> None:
    def found(**sampling: Any) -> list[int]:
        request = GenerationRequest(
            request_id="a", prompt_token_ids=[1], sampling=SamplingParams(**sampling), seed=0
        )
        return stop_ids(request, (9, 2))

    assert found() == [2, 9]
    assert found(stop_token_ids=(5, 2)) == [2, 5, 9]
    assert found(stop_token_ids=(5,), stop_at_eos=False) == [5]
    assert found(stop_at_eos=False) == []


def test_special_tokens_are_text(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path, width=32, num_layers=1, mlp_width=32)
    assert text_decoder(path)([1, 36, 2]) == "<bos>B<eos>"


def test_every_end_of_sequence_counts(tmp_path: Path) -> None:
    """Use tokens of the generation configuration, or else the configuration, and the tokenizer."""
    path = build_tiny_model(tmp_path, width=32, num_layers=1, mlp_width=32)
    generation_config = path / "generation_config.json"
    generation_config.write_text(json.dumps({"eos_token_id": [7, 11]}))
    assert end_of_sequence_ids(path) == (2, 7, 11)
    generation_config.unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    assert end_of_sequence_ids(path) == (2, 5)


def test_a_text_keeps_its_leading_space_where_the_tokenizer_takes_one_away(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("llama2")
    tokenizer.save_pretrained(tmp_path)
    token_ids = tokenizer("2", add_special_tokens=False)["input_ids"]  # with a blank
    assert tokenizer.decode(token_ids) == "2"
    assert text_decoder(tmp_path)(token_ids) == " 2"
