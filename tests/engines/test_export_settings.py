"""An export always succeeds, and its files load and save again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from recipes import arithmetic
from recipes.grpo import grpo
from recipes.quickstart import QuickstartConfig
from rlsys import ModelConfig
from rlsys.engines.models.export_settings import check_exportable, exportable, save_settings
from rlsys.launcher.tiny_models import build_tiny_model
from tests.engines.training_harness import make_engine
from tests.errors import invalid

NAMES = (
    ["temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "do_sample"],
    ["num_beams", "length_penalty", "early_stopping", "pad_token_id", "output_scores"],
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), characters=arithmetic.CHARACTERS)


def settings(path: Path) -> tuple[Any, Any]:
    return AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize(
    ("given", "kept", "num_changes"),
    [
        ({"temperature": 0.6}, {"do_sample": True, "temperature": 0.6}, 1),
        ({"top_p": 0.9, "do_sample": False}, {"do_sample": True, "top_p": 0.9}, 1),
        ({"top_k": 20, "eos_token_id": [1, 2]}, {"top_k": 20, "eos_token_id": [1, 2]}, 1),
        ({"pad_token_id": -1, "eos_token_id": 1}, {"pad_token_id": None, "eos_token_id": 1}, 1),
        ({"length_penalty": 2.0, "bos_token_id": 3}, {"bos_token_id": 3}, 1),
        ({"temperature": 0.6, "length_penalty": 2.0}, {"do_sample": True, "temperature": 0.6}, 2),
        ({"do_sample": True, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}, 0),
        ({"eos_token_id": 1}, {"eos_token_id": 1, "do_sample": None}, 0),
    ],
)
def test_generation_settings_are_repaired(
    given: dict[str, Any], kept: dict[str, Any], num_changes: int, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    fixed, changes = exportable(GenerationConfig.from_pretrained(tmp_path))
    fixed.save_pretrained(tmp_path / "out")
    again = GenerationConfig.from_pretrained(tmp_path / "out")
    assert {name: getattr(again, name) for name in kept} == kept
    assert len(changes) == num_changes


@given(
    st.dictionaries(
        st.sampled_from([*NAMES[0], *NAMES[1]]),
        st.sampled_from([None, True, False, -1, 0, 1, 0.5, 3]),
    )
)
def test_all_settings_that_load_can_be_saved(given: dict[str, Any]) -> None:
    generation = GenerationConfig(eos_token_id=1)
    for name, value in given.items():
        setattr(generation, name, value)
    fixed, changes = exportable(generation)
    fixed.validate(strict=True)
    assert fixed.eos_token_id == 1
    assert bool(changes) == _is_refused(generation)


def _is_refused(generation: GenerationConfig) -> bool:
    try:
        generation.validate(strict=True)
    except (ValueError, TypeError):
        return True
    return False


def test_a_model_with_such_settings_is_exported(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "model", characters=arithmetic.CHARACTERS)
    (path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 1}')
    make_engine(path).export(tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.generation_config.temperature == 0.6
    exported.save_pretrained(tmp_path / "again")


def test_changes_of_an_export_are_warnings_before_the_start(model: Path, tmp_path: Path) -> None:
    config, tokenizer = settings(model)
    assert check_exportable(str(model), config, tokenizer, generates=True) == []
    path = build_tiny_model(tmp_path / "model", characters=arithmetic.CHARACTERS)
    (path / "generation_config.json").write_text('{"temperature": 0.6}')
    (warning,) = check_exportable(str(path), config, tokenizer, generates=True)
    assert "do_sample=True" in warning
    assert check_exportable(str(path), config, tokenizer, generates=False) == []


@pytest.mark.parametrize("text", ['{"max_new_tokens": 0}', "[]", '{"cache_implementation": 1}'])
def test_settings_that_cannot_be_read_are_refused_before_a_start(text: str, tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "model", characters=arithmetic.CHARACTERS)
    (path / "generation_config.json").write_text(text)
    config = QuickstartConfig(runs_dir=str(tmp_path / "runs"), model=ModelConfig(path=str(path)))
    for dry_run in (True, False):
        with invalid("model.path", str(path)) as refused:
            arithmetic.run(config, grpo, dry_run=dry_run)
        assert "generation_config.json" in refused.value.rule


def test_a_tokenizer_that_cannot_be_saved_is_refused(model: Path) -> None:
    config, tokenizer = settings(model)

    class Unsaved:
        def save_pretrained(self, directory: object) -> None:
            raise NotImplementedError("no vocabulary file")

    with invalid("model.path", str(model)) as refused:
        check_exportable(str(model), config, Unsaved(), generates=True)
    assert "no vocabulary file" in refused.value.rule
    with pytest.raises(NotImplementedError):
        save_settings(config, None, Unsaved(), model / "out")
    assert tokenizer is not None
