"""Adapters in mixtures of experts, against PEFT: the experts stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlsys.algorithms import cross_entropy
from rlsys.config import ModelConfig
from rlsys.config.lora import check_lora
from rlsys.engines.models.causal_lm import save_model
from rlsys.engines.models.model_shape import model_shape
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.launcher.memory_estimate import num_trained
from rlsys.launcher.tiny_models import build_tokenizer
from tests.engines.training_harness import (
    assert_same,
    make_engine,
    make_rows,
    train_step,
    weights,
)
from tests.errors import invalid
from tests.tiers import rest_slow

peft = pytest.importorskip("peft")

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}


@pytest.fixture(scope="module", params=rest_slow(EXPERTS))
def model_path(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = build_tokenizer("0123456789+-*/=. #")
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model(request.param, **(fields | EXPERTS[request.param]))
    path: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    save_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def engine(model_path: Path) -> Iterator[FSDPEngine]:
    """After two steps: before the first, B is 0."""
    made = make_engine(model_path, lora="r4", loss=cross_entropy(), temperature=1.0)
    for seed in range(2):
        train_step(made, make_rows(4, seed))
    yield made
    made.close()


def test_adapters_stand_beside_attention_and_export_as_peft_loads_them(
    model_path: Path, engine: FSDPEngine, tmp_path: Path
) -> None:
    is_latent = "deepseek" in AutoConfig.from_pretrained(model_path).model_type
    adapted = {name.split(".lora_")[0] for name in engine.parameters}
    assert {name.rpartition(".")[2] for name in adapted} == (LATENT if is_latent else ATTENTION)
    assert len(adapted) == 2 * (5 if is_latent else 4)

    engine.export(tmp_path / "hf")
    base = AutoModelForCausalLM.from_pretrained(model_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        before = base(tokens).logits
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "hf" / "adapter")
        logits = theirs(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, logits, atol=1e-3)


def test_what_is_published_is_the_merged_model_with_the_experts_of_the_base(
    model_path: Path, engine: FSDPEngine, tmp_path: Path
) -> None:
    published = weights(engine)
    engine.export(tmp_path / "hf")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_same(published, merged.state_dict(), rtol=0, atol=0)
    base = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    assert published.keys() == base.keys()
    changed = {name for name in base if not torch.equal(published[name], base[name])}
    adapted = {f"{name.split('.lora_')[0]}.weight" for name in engine.parameters}
    assert changed == adapted
    assert any("experts" in name for name in base)


def test_what_cannot_be_adapted_is_refused_from_the_shape_alone(
    model_path: Path, engine: FSDPEngine
) -> None:
    shape = model_shape(str(model_path))
    check_lora("r4", shape.linear_layers)
    check_lora("r4:o_proj", shape.linear_layers)
    for name in ("gate_proj", "experts", "gate_up_proj", "lm_head"):
        with invalid("model.lora", f"r4:{name}") as found:
            check_lora(f"r4:{name}", shape.linear_layers)
        assert name in found.value.rule
    num_adapters = sum(tensor.numel() for tensor in engine.parameters.values())
    model = ModelConfig(path=str(model_path), lora="r4")
    assert num_trained(shape, model) == num_adapters
