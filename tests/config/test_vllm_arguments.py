"""rollout.vllm: every argument of the installed vLLM has a kind, names and types are checked."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import RolloutConfig, RunConfig
from rlsys.config.command_line import parse
from rlsys.config.fields import build, from_dict, to_dict, to_toml
from rlsys.config.lora import Lora
from rlsys.config.speculation import PASSED, RENAMED, Speculation, check_untrained, untrained
from rlsys.config.vllm_argument_types import check_types, installed_arguments, wrong_value
from rlsys.config.vllm_arguments import (
    LEAST,
    VLLM_ARGUMENTS,
    check_vllm_arguments,
    marked_arguments,
    table_lines,
)
from rlsys.errors import InvalidValues
from tests.errors import invalid

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)
DOCS = Path(__file__).parents[2] / "docs" / "rollouts.md"


def limits_of_vllm() -> dict[str, int]:
    """Least integers of the fields of the installed vLLM's configurations, from its source."""
    found = {}
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    for path in (Path(spec.origin).parent / "config").glob("*.py"):
        field = r"^    (\w+): ([^=]*?)= Field\(([^()]*)\)"
        for name, kind, arguments in re.findall(field, path.read_text(), re.MULTILINE):
            if least := re.search(r"\b(ge|gt)=(\d+)\b", arguments):
                found[name] = int(least[2]) + (least[1] == "gt" and "int" in kind)
    return found


@needs_vllm
def test_least_values_are_those_of_the_installed_vllm() -> None:
    """Passed arguments with a limit in vLLM's configuration have the same one here."""
    limits = limits_of_vllm()
    assert {"max_num_batched_tokens", "block_size"} <= set(limits)
    passed = {name for name, one in VLLM_ARGUMENTS.items() if one.kind in ("passed", "marked")}
    assert {name: limits[name] for name in limits.keys() & LEAST.keys()} == {
        name: LEAST[name] for name in limits.keys() & LEAST.keys()
    }
    assert limits.keys() & passed <= LEAST.keys()


@needs_vllm
def test_each_argument_of_the_installed_vllm_has_a_kind() -> None:
    assert set(installed_arguments()) == set(VLLM_ARGUMENTS)


def test_the_documentation_has_the_table() -> None:
    assert "\n".join(table_lines()) in DOCS.read_text()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_num_batched_token": 1}, "max_num_batched_token"),
        ({"model": "x"}, "model"),
        ({"max_num_seqs": 4}, "max_num_seqs"),
        ({"worker_cls": "x"}, "worker_cls"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"enforce_eager": False}, "enforce_eager"),  # on the CPU
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"block_size": 0}, "block_size"),
        ({"watermark": -0.1}, "watermark"),
        ({"watermark": float("nan")}, "watermark"),
    ],
)
def test_unknown_owned_and_refused_arguments(values: dict[str, Any], field: str) -> None:
    with invalid(f"rollout.vllm.{field}"):
        check_vllm_arguments(values, num_gpus=0)
    with invalid(f"rollout.vllm.{field}"):
        build(RunConfig, {"rollout.engine": "vllm", "rollout.vllm": values})


@pytest.mark.parametrize(
    ("name", "rule", "fix"),
    [
        ("max_num_seqs", "the option rollout.max_running", "--rollout.max-running"),
        ("seed", "the option seed", "--seed"),
        ("hf_token", "the variable HF_TOKEN", "variable HF_TOKEN"),
        ("max_model_len", "data.max_prompt_tokens and sampling.max_tokens", "options"),
    ],
)
def test_an_owned_argument_names_the_option_that_sets_it(name: str, rule: str, fix: str) -> None:
    with invalid(f"rollout.vllm.{name}", 4) as found:
        check_vllm_arguments({name: 4}, num_gpus=0)
    assert rule in found.value.rule
    assert fix in found.value.fix


@pytest.mark.parametrize("text", ['{"moe_backend": "triton"', "[1,", '"open'])
def test_broken_json_is_not_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(RunConfig, ["--rollout.engine", "vllm", "--rollout.vllm.kernel-config", text])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--rollout.vllm.kernel-config" in line


@needs_vllm
def test_a_mistake_of_a_type_has_the_exit_code_of_all_mistakes_of_options() -> None:
    with pytest.raises(SystemExit) as end:
        parse(RunConfig, ["--rollout.engine", "vllm", "--rollout.vllm.block-size", "many"])
    assert end.value.code == 2


def test_an_empty_address_is_not_a_local_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell variable that is not set must not start an engine on this machine."""
    for text in ("", "http://a,", " "):
        with pytest.raises(SystemExit) as end:
            parse(RunConfig, ["--rollout.engine", "vllm", "--rollout.urls", text])
        assert end.value.code == 2
        assert "rollout.urls" in capsys.readouterr().err


def test_a_policy_without_adapters_gets_whole_weights() -> None:
    adapted = RolloutConfig(engine="vllm", vllm={"enable_lora": True, "watermark": 0.1})
    assert adapted.serving(Lora.parse("r8")) is adapted
    assert adapted.serving(None).vllm == {"watermark": 0.1}


def test_all_mistakes_are_raised_at_once() -> None:
    with pytest.raises(InvalidValues) as found:
        build(RunConfig, {"rollout.engine": "vllm", "rollout.vllm": {"model": "x", "bogus": 1}})
    assert len(found.value.errors) == 2


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"vllm": {"max_num_batched_tokens": 64}}, "rollout.vllm"),  # of the torch engine
        ({"engine": "vllm", "num_gpus": 1, "vllm": {"pipeline_parallel_size": 2}}, "num_gpus"),
        ({"engine": "vllm", "vllm": {"enable_expert_parallel": True}}, "enable_expert_parallel"),
        ({"engine": "vllm", "vllm": {"max_num_batched_tokens": 255}}, "max_num_batched_tokens"),
        (
            {"engine": "vllm", "max_running": 4, "vllm": {"max_num_active_seqs": 5}},
            "max_num_active_seqs",
        ),
    ],
)
def test_arguments_that_contradict_other_options(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError) as found:  # noqa: PT011, the field is compared
        RolloutConfig(**options)
    assert getattr(found.value, "field", "").endswith(field)


@needs_vllm
@pytest.mark.parametrize(
    "values",
    [
        {"max_num_batched_tokens": "abc"},
        {"max_num_batched_tokens": 12.5},
        {"max_num_batched_tokens": True},
        {"kv_cache_dtype": "fp9"},
        {"enable_chunked_prefill": 3},
        {"performance_mode": "fast"},
        {"kernel_config": "triton"},  # a nested configuration is a table
        {"kernel_config": {"moe_backends": "triton"}},
    ],
)
def test_a_value_of_another_type(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    with invalid(f"rollout.vllm.{name}", value):
        check_types(values)


@needs_vllm
def test_values_of_the_right_types() -> None:
    check_types(
        {
            "max_num_batched_tokens": 64,
            "kv_cache_dtype": "fp8",
            "watermark": 0,  # an integer is a float
            "enable_chunked_prefill": True,
            "limit_mm_per_prompt": {"image": 2},
            "attention_backend": "FLASH_ATTN",  # only vLLM knows these
            "kernel_config": {"moe_backend": "triton"},
        }
    )


def test_only_arguments_that_round_are_marked() -> None:
    assert list(marked_arguments({"kv_cache_dtype": "fp8", "max_num_batched_tokens": 4})) == [
        "rollout.vllm.kv_cache_dtype=fp8"
    ]
    assert not marked_arguments({"kv_cache_dtype": "auto"})


def test_the_command_line_adds_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[rollout]\nengine = "vllm"\n[rollout.vllm]\nmax-num-batched-tokens = 512\n'
        "watermark = 0.1\n"
        "limit_mm_per_prompt = {my-kind = 1}\n"
    )
    options = "--rollout.vllm.watermark 0.2 --rollout.vllm.kv_cache_dtype fp8"
    more = "--rollout.vllm.enable-chunked-prefill"
    found = parse(RunConfig, ["--config", str(file), *options.split(), more]).config.rollout.vllm
    assert found == {
        "max_num_batched_tokens": 512,
        "watermark": 0.2,
        "limit_mm_per_prompt": {"my-kind": 1},
        "kv_cache_dtype": "fp8",
        "enable_chunked_prefill": True,
    }


@pytest.mark.parametrize("annotation", [dict, list, dict[str, Any], list[int] | None])
def test_an_error_of_a_type_has_no_python_notation(annotation: Any) -> None:
    fix = wrong_value("kernel_config", 3, annotation).fix
    assert not re.search(r"<class|typing|Optional|None", fix)


def test_tables_survive_toml_and_json(tmp_path: Path) -> None:
    values = {"additional_config": {"a b": [1, {"c": "ü\n"}]}, "watermark": 0.5}
    config = build(RunConfig, {"rollout.engine": "vllm", "rollout.vllm": values})
    assert from_dict(RunConfig, to_dict(config)) == config
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert parse(RunConfig, ["--config", str(file)]).config == config


@pytest.mark.parametrize("value", [None, object(), float("nan"), {"inner": None}])
def test_a_table_holds_plain_values(value: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        RolloutConfig(engine="vllm", vllm={"kernel_config": value})


def test_a_table_is_copied() -> None:
    given = {"max_num_batched_tokens": 512}
    config = RolloutConfig(engine="vllm", vllm=given)
    given["max_num_batched_tokens"] = 1
    assert config.vllm == {"max_num_batched_tokens": 512}


@pytest.mark.parametrize(
    ("values", "engine", "field"),
    [
        ({"method": "ngrams"}, "torch", "method"),
        ({"num_tokens": 4}, "torch", "method"),
        ({"method": "eagle3", "model": "x"}, "torch", "method"),
        ({"method": "ngram", "num_tokens": 0}, "torch", "num_tokens"),
        ({"method": "ngram", "num_tokens": 4.5}, "torch", "num_tokens"),
        ({"method": "ngram", "min_match": 5, "max_match": 3}, "torch", "min_match"),
        ({"method": "ngram", "model": "x"}, "torch", "model"),
        ({"method": "draft_model"}, "vllm", "model"),
        ({"method": "mtp", "model": "x"}, "vllm", "model"),
        ({"method": "mtp", "trained_along": True}, "vllm", "trained_along"),
        ({"method": "eagle3", "trained_along": "yes"}, "vllm", "trained_along"),
        ({"method": "eagle3", "model": "x", "learning_rate": 1e-4}, "vllm", "learning_rate"),
        ({"method": "eagle3", "trained_along": True, "learning_rate": 0}, "vllm", "learning_rate"),
        (
            {"method": "eagle3", "trained_along": True, "parallel_drafting": True},
            "vllm",
            "parallel_drafting",
        ),
        ({"method": "mtp", "rejection_sample_method": "synthetic"}, "vllm", None),
        ({"method": "ngram", "num_speculative_tokens": 3}, "vllm", "num_speculative_tokens"),
    ],
)
def test_options_of_speculation(values: dict[str, Any], engine: Any, field: str | None) -> None:
    with invalid(f"rollout.speculation.{field or 'rejection_sample_method'}"):
        RolloutConfig(engine=engine, speculation=values)


def test_speculation_in_the_words_of_vllm() -> None:
    ngram = Speculation.of({"method": "ngram", "num_tokens": 3}, "vllm")
    assert ngram is not None
    assert ngram.for_vllm() == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    new = Speculation.of({"method": "eagle3", "trained_along": True, "num_tokens": 2}, "vllm")
    assert new is not None
    assert new.for_vllm("head") == {
        "method": "eagle3",
        "num_speculative_tokens": 2,
        "model": "head",
    }
    eagle = Speculation.of({"method": "eagle3", "model": "x", "max_model_len": 9}, "vllm")
    assert eagle is not None
    assert eagle.for_vllm() == {
        "method": "eagle3",
        "num_speculative_tokens": 4,
        "model": "x",
        "max_model_len": 9,
    }
    assert Speculation.of({}, "vllm") is None


def test_an_engine_without_a_trainer_takes_a_given_head_as_it_is() -> None:
    trained = {"method": "eagle3", "trained_along": True, "learning_rate": 1e-4, "num_tokens": 2}
    assert untrained(trained) == {}
    assert untrained(trained | {"model": "x"}) == {
        "method": "eagle3",
        "model": "x",
        "num_tokens": 2,
    }
    assert untrained({"method": "ngram"}) == {"method": "ngram"}
    check_untrained({"method": "eagle3", "model": "x"}, "an evaluation")
    with invalid("rollout.speculation.trained_along"):
        check_untrained(trained, "an evaluation")


@needs_vllm
def test_passed_options_are_fields_of_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "config" / "speculative.py").read_text()
    for name in (*PASSED, *RENAMED, "method", "model"):
        assert f"\n    {name}: " in source, name
