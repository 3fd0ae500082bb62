"""Exports, checkpoints and published weights include all tensors that the trainer computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.engines.generation.torch.backbone import Backbone
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import TrainRow
from tests.engines.buffered_models import BUFFERED, build_buffered
from tests.engines.published import read_all
from tests.engines.training_harness import make_engine, make_rows, save, train_step
from tests.tiers import rest_slow

FAMILIES = sorted(BUFFERED)


@pytest.fixture(scope="module", params=rest_slow(FAMILIES, only=["deepseek_v3"]))
def paths(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Sequence[Path]:
    """Two models of one family that differ in parameters and buffers."""
    root = tmp_path_factory.mktemp("models")
    return [build_buffered(root / str(seed), request.param, seed=seed) for seed in (0, 1)]


def trained(path: Path, **options: Any) -> FSDPEngine:
    engine = make_engine(path, temperature=1.0, **options)
    train_step(engine, make_rows(3))
    return engine


def buffers(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = ("e_score_correction_bias", "layer_scalar")
    return {name: tensor for name, tensor in tensors.items() if name.endswith(names)}


def hf_logprobs(path: Path, rows: Sequence[TrainRow]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    found = []
    for row in rows:
        tokens = torch.tensor([*row.prompt_token_ids, *row.token_ids])
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, len(row.prompt_token_ids) - 1 : -1]
        targets = torch.from_numpy(row.token_ids).long()
        found.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return found


def test_a_model_is_its_parameters_and_persistent_buffers_tied_ones_once(
    paths: Sequence[Path],
) -> None:
    model = load_causal_lm(paths[0], dtype="float32")
    tensors = model_tensors(model)
    parameters = dict(model.named_parameters())
    assert tensors.keys() - parameters.keys() == buffers(tensors).keys()
    assert parameters.keys() <= tensors.keys()
    assert all(tensors[name] is parameter for name, parameter in parameters.items())
    assert not any("inv_freq" in name for name in tensors)  # follows from the configuration


def test_an_export_computes_what_the_trainer_computes(
    paths: Sequence[Path], tmp_path: Path
) -> None:
    engine = trained(paths[0])
    rows = make_rows(4, seed=1)
    engine.export(tmp_path / "hf")
    found = hf_logprobs(tmp_path / "hf", rows)
    for ours, theirs in zip(engine.infer(rows), found, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)


def test_a_16_bit_export_keeps_buffers_as_they_are(paths: Sequence[Path], tmp_path: Path) -> None:
    engine = make_engine(paths[0], dtype="bfloat16")
    engine.export(tmp_path / "hf")
    original = buffers(model_tensors(load_causal_lm(paths[0], dtype="float32")))
    exported = buffers(model_tensors(load_causal_lm(tmp_path / "hf", dtype="float32")))
    for name, tensor in exported.items():
        assert torch.equal(tensor, original[name])


def test_a_checkpoint_holds_the_buffers(paths: Sequence[Path], tmp_path: Path) -> None:
    engine = trained(paths[0])
    save(engine, tmp_path / "saved")
    other = make_engine(paths[1], temperature=1.0)
    other.load(tmp_path / "saved")
    rows = make_rows(4, seed=1)
    for ours, theirs in zip(engine.infer(rows), other.infer(rows), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", rest_slow(["float32", "bfloat16", "float16"], only=("bfloat16",)))
def test_a_torch_engine_that_took_new_weights_equals_a_freshly_loaded_one(
    paths: Sequence[Path], tmp_path: Path, dtype: str
) -> None:
    trainer = trained(paths[0], dtype=dtype)
    manifest = trainer.publish()
    assert manifest is not None
    assert buffers(read_all(manifest))
    trainer.export(tmp_path / "hf")
    model = load_causal_lm(paths[1], dtype=dtype)
    with Weights(manifest) as weights:
        served = Backbone(model)
        served.load(weights, served.prepare(weights))
    fresh = model_tensors(load_causal_lm(tmp_path / "hf", dtype=dtype))
    for name, tensor in model_tensors(model).items():
        assert tensor.dtype is fresh[name].dtype, name
        assert torch.equal(tensor, fresh[name]), name
    trainer.close()
