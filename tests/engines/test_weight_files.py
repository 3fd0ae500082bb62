"""Weights are read and written in parts, and equal those that transformers reads whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlsys.engines.models import weight_files
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.lazy_tensors import Index, LazyTensor
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.training import export
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.reallocation.shards import local_part
from scripts.bench.layouts import build_model
from scripts.ranks import on_ranks
from tests.engines.training_harness import Weights, make_engine, tiny_model, weights
from tests.errors import invalid

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DAMAGED = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return counted(monkeypatch.setattr)


def counted(replace: Callable[[Any, str, Any], None]) -> list[int]:
    """Return a list that gets the numbers read from safetensors files, once per part."""
    counts: list[int] = []
    read_files = weight_files.lazy_tensors

    def counted_tensor(tensor: LazyTensor) -> LazyTensor:
        def read(index: Index) -> torch.Tensor:
            part = tensor.read(index)
            counts.append(part.numel())
            return part

        return LazyTensor(tensor.shape, tensor.dtype, read)

    def counting(path: str | Path) -> dict[str, LazyTensor]:
        return {name: counted_tensor(tensor) for name, tensor in read_files(path).items()}

    replace(weight_files, "lazy_tensors", counting)
    return counts


def num_held(engine: FSDPEngine) -> int:
    return sum(local_part(tensor).numel() for tensor in engine.base.values())


CASES = (
    *(("qwen3_moe", "dp4"), ("qwen3_moe", "dp2tp2"), ("gpt_oss", "dp2ep2")),
    *(("deepseek_v3", "tp2pp2"), ("olmo2", "dp2x2"), ("gemma3_text", "dp2tp2")),
)
EXPORTED = CASES[1:4]
FILE_BYTES = 60_000


@dataclass(frozen=True, kw_only=True)
class Found:
    """Results of one rank in each case."""

    published: list[Weights]  # by rank 0
    num_read: list[int]
    num_held: list[int]
    refusal: str  # message for a damaged model


def on_a_rank(rank: int, world_size: int, directory: Path) -> Found:
    found = Found(published=[], num_read=[], num_held=[], refusal=refusal(rank, directory))
    counts = counted(setattr)
    export.FILE_BYTES = FILE_BYTES
    for family, layout in CASES:
        counts.clear()
        engine = make_engine(directory / family, layout=layout, rank=rank, world_size=world_size)
        found.published.append(weights(engine))
        found.num_read.append(sum(counts))
        found.num_held.append(num_held(engine))
        if (family, layout) in EXPORTED:
            engine.export(directory / f"{family}-{layout}")
        engine.close()
    return found


def refusal(rank: int, directory: Path) -> str:
    with invalid("model.path", str(directory / "damaged")) as refused:
        make_engine(directory / "damaged", rank=rank, world_size=4)
    return str(refused.value)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the models of all cases, and a damaged one."""
    root = tmp_path_factory.mktemp("models")
    for family in {family for family, _ in CASES}:
        build_model(root / family, family)
    rewrite(tiny_model(root / "damaged"), with_bad_numbers)
    return root


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[Found]:
    return on_ranks(4, on_a_rank, directory)


@pytest.mark.slow
def test_all_ranks_together_hold_the_model(ranks: list[Found], directory: Path) -> None:
    for number, (family, layout) in enumerate(CASES):
        expected = model_tensors(load_causal_lm(directory / family, dtype="float32"))
        assert_equal(ranks[0].published[number], expected, what=f"{family} {layout}")


def test_each_rank_reads_what_it_holds(ranks: list[Found]) -> None:
    for rank in ranks:
        assert rank.num_read == rank.num_held


def test_all_ranks_refuse_weights_that_are_no_numbers_by_name(
    ranks: list[Found], directory: Path
) -> None:
    with invalid("model.path", str(directory / "damaged")) as whole:
        load_causal_lm(directory / "damaged", dtype="float32")
    assert f"2 of 1,536 weights of {DAMAGED}" in whole.value.rule
    assert {rank.refusal for rank in ranks} == {str(whole.value)}


@pytest.mark.parametrize(("family", "layout"), EXPORTED)
def test_an_export_has_the_tensors_that_the_model_came_with_in_several_files(
    family: str, layout: str, ranks: list[Found], directory: Path
) -> None:
    exported = directory / f"{family}-{layout}"
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    files = sorted(exported.glob("*.safetensors"))
    assert len(files) > 2
    found: Weights = {}
    for number, file in enumerate(files, 1):
        assert file.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= FILE_BYTES
        assert {index["weight_map"][name] for name in tensors} == {file.name}
        found |= tensors
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    assert_equal(found, load_file(directory / family / "model.safetensors"))
    for name in ("config.json", "generation_config.json"):
        assert (exported / name).read_text() == (directory / family / name).read_text()


def assert_equal(found: Weights, expected: Weights, *, what: str = "") -> None:
    assert found.keys() == expected.keys(), what
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), (what, name)


# Variants of a model's files. Each function changes a directory in place.


def as_saved(path: Path) -> None:
    pass


def in_bfloat16(path: Path) -> None:
    rewrite(path, lambda tensors: {name: x.bfloat16() for name, x in tensors.items()})


def in_two_files(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, path / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, **index}))
    (path / "model.safetensors").unlink()


def as_torch_file(path: Path) -> None:
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def with_a_tied_head_too(path: Path) -> None:
    rewrite(path, lambda tensors: {**tensors, HEAD: tensors[EMBEDDING].clone()})


def with_another_head(path: Path) -> None:
    rewrite(path, lambda tensors: {**tensors, HEAD: tensors[EMBEDDING] + 1})


def with_names_of_the_backbone(path: Path) -> None:
    rewrite(path, lambda tensors: {n.removeprefix("model."): x for n, x in tensors.items()})


def with_bad_numbers(tensors: Weights) -> Weights:
    tensors[DAMAGED][0, :2] = torch.nan  # rows of rank 0
    return tensors


def rewrite(path: Path, change: Callable[[Weights], Weights]) -> None:
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        *(as_saved, in_bfloat16, in_two_files, as_torch_file, with_a_tied_head_too),
        *(with_another_head, with_names_of_the_backbone),
    ],
)
def test_weights_of_all_kinds_of_files_are_those_of_transformers(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tiny_model(tmp_path / "model")
    change(path)
    engine = make_engine(path)
    torch.manual_seed(0)
    expected = load_causal_lm(path, dtype="float32")
    assert_equal(
        {name: tensor.detach() for name, tensor in engine.base.items()},
        model_tensors(expected),
    )
    own = dict(engine.model.named_buffers())
    for name, buffer in expected.named_buffers():  # buffers that no file holds, too
        assert torch.equal(own[name], buffer), name
    head, embedding = engine.model.get_output_embeddings(), engine.model.get_input_embeddings()
    assert (head.weight is embedding.weight) is (change is not with_another_head)


def test_one_rank_reads_each_number_once(num_read: list[int], tmp_path: Path) -> None:
    engine = make_engine(tiny_model(tmp_path))
    assert sum(num_read) == num_held(engine)


def test_a_model_that_changes_its_weights_as_it_loads_is_loaded_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers import Qwen3ForCausalLM

    tie = Qwen3ForCausalLM.tie_weights

    def tie_and_double(self: Any, *args: Any, **options: Any) -> None:
        tie(self, *args, **options)
        if not self.model.norm.weight.is_meta:
            self.model.norm.weight.data.mul_(2)

    path = tiny_model(tmp_path)
    once = load_causal_lm(path, dtype="float32").model.norm.weight
    monkeypatch.setattr(Qwen3ForCausalLM, "tie_weights", tie_and_double)
    engine = make_engine(path)
    assert torch.equal(engine.base["model.norm.weight"], 2 * once)


def test_a_fresh_head_begins_as_zeros(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    critic = make_engine(path, head="value").model
    expected = model_tensors(load_causal_lm(path, dtype="float32"))
    assert not critic.score.weight.any()
    for name, tensor in model_tensors(critic).items():
        assert name == "score.weight" or torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("damage", ["shape", "short", "missing", "quantised"])
def test_lazy_and_whole_loading_raise_the_same_errors(damage: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    file, config = path / "model.safetensors", path / "config.json"
    if damage == "shape":
        rewrite(path, lambda tensors: {**tensors, "model.norm.weight": torch.ones(7)})
    elif damage == "short":
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "missing":
        file.unlink()
    else:
        settings = json.loads(config.read_text())
        settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
        config.write_text(json.dumps(settings))
    with invalid("model.path", str(path)) as whole:
        load_causal_lm(path, dtype="float32")
    with invalid("model.path", str(path)) as lazy:
        make_engine(path)
    assert str(lazy.value) == str(whole.value)


UP = "model.layers.1.mlp.up_proj.weight"


def _without_a_matrix(tensors: Weights) -> Weights:
    return {name: one for name, one in tensors.items() if name != UP}


def _with_a_bias(tensors: Weights) -> Weights:
    return {**tensors, "model.layers.1.self_attn.q_proj.bias": torch.zeros(4)}


def _with_a_layer(tensors: Weights) -> Weights:
    return tensors | {name.replace(".1.", ".9."): one.clone() for name, one in tensors.items()}


def _of_another_width(tensors: Weights) -> Weights:
    return {**tensors, UP: torch.zeros(7, 5)}


def _untied(tensors: Weights) -> Weights:
    return tensors  # the test changes config.json


@pytest.mark.parametrize(
    ("mixed_up", "problem"),
    [
        (_without_a_matrix, rf"missing {UP}$"),
        (_with_a_bias, r"unexpected model\.layers\.1\.self_attn\.q_proj\.bias$"),
        (_with_a_layer, r"unexpected model\.layers\.9\.\S+, \S+, \S+ and \d more$"),
        (_of_another_width, rf"{UP}: \(7, 5\) instead of \("),
        (_untied, r"missing lm_head\.weight$"),
    ],
)
def test_files_of_another_model_are_refused(
    mixed_up: Callable[[Weights], Weights], problem: str, tmp_path: Path
) -> None:
    path = tiny_model(tmp_path)
    rewrite(path, mixed_up)
    if mixed_up is _untied:
        config = path / "config.json"
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False})
        )
    for load in (make_engine, lambda path: load_causal_lm(path, dtype="float32")):
        with invalid("model.path", str(path)) as refused:
            load(path)
        assert re.search(problem, refused.value.rule)


def test_weights_outside_the_layers_are_ignored(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    expected = weights(make_engine(path))
    rewrite(path, lambda tensors: {**tensors, "vision_tower.weight": torch.ones(2)})
    assert_equal(weights(make_engine(path)), expected, what="with a tower")


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.bool])
def test_integer_weights_are_rejected(kind: torch.dtype, tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    rewrite(path, lambda tensors: {**tensors, UP: (100 * tensors[UP]).to(kind)})
    with invalid("model.path", str(path)) as refused:
        make_engine(path)
    assert f"{UP} in {kind}" in refused.value.rule


def test_a_file_that_would_run_code_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_model(tmp_path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save({**tensors, "more": RunsCode()}, path / "pytorch_model.bin")
    with invalid("model.path", str(path)) as refused:
        make_engine(path)
    assert ".bin" in refused.value.rule
    assert "it has run" not in capsys.readouterr().out


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("it has run",)
