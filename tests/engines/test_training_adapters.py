"""Low-rank adapters against PEFT: gradients, merged weights, exports, checkpoints, ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlsys import metrics
from rlsys.algorithms import cross_entropy, value_loss
from rlsys.config import ModelConfig, RoleConfig, RunConfig, TrainedRoleConfig, TrainerConfig
from rlsys.config.lora import Lora
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.engines.inference.frozen_model import InferenceEngine
from rlsys.engines.models.model_shape import model_shape
from rlsys.engines.models.model_tensors import meta_model
from rlsys.engines.training.adapters import factor_tensors
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.launcher.memory_estimate import checkpoint_bytes, num_trained
from rlsys.types import StepResult, TrainRow
from scripts.ranks import on_ranks
from tests.engines.training_harness import (
    Weights,
    accumulate,
    assert_same,
    gradients,
    make_engine,
    make_rows,
    save,
    tiny_model,
    train_step,
    weights,
    whole_state,
)
from tests.errors import invalid
from tests.tiers import rest_slow

peft = pytest.importorskip("peft")

LORA = "r4a12"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("adapters") / "model")


@pytest.fixture
def engine(model_path: Path) -> Iterator[FSDPEngine]:
    """Return an engine after a step, without which B is 0 and A has no gradient."""
    made = make_engine(model_path, lora=LORA, loss=cross_entropy(), temperature=1.0)
    step(made)
    yield made
    made.close()


def step(engine: FSDPEngine, seed: int = 0) -> StepResult:
    return train_step(engine, make_rows(6, seed))


def loaded(model_path: Path, directory: Path, kind: Any = AutoModelForCausalLM) -> Any:
    """Load the original model and the exported adapter with PEFT alone."""
    options = {"num_labels": 1} if kind is AutoModelForSequenceClassification else {}
    base = kind.from_pretrained(model_path, **options)
    return peft.PeftModel.from_pretrained(base, directory / "adapter", is_trainable=True)


def test_gradients_are_pefts_own(model_path: Path, engine: FSDPEngine, tmp_path: Path) -> None:
    engine.export(tmp_path / "hf")
    theirs = loaded(model_path, tmp_path / "hf")
    rows = make_rows(6, seed=3)
    for row in rows:
        tokens = torch.tensor([*row.prompt_token_ids, *row.token_ids])
        logprobs = theirs(tokens[None]).logits[0].float().log_softmax(-1)
        start = len(row.prompt_token_ids)
        places = torch.arange(start, len(tokens))[torch.from_numpy(row.loss_mask)]
        (-logprobs[places - 1, tokens[places]].sum()).backward()
    expected = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    accumulate(engine, [rows])
    found = gradients(engine)
    assert all(bool(gradient.any()) for gradient in found.values())
    assert_same(found, expected, rtol=1e-4, atol=1e-5)


def test_published_weights_include_the_adapters(
    model_path: Path, engine: FSDPEngine, tmp_path: Path
) -> None:
    engine.export(tmp_path / "hf")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        theirs = loaded(model_path, tmp_path / "hf")(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, theirs, rtol=1e-4, atol=1e-5)
    published = weights(engine)
    base = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    assert_same(published, dict(merged.named_parameters()), rtol=0, atol=0)

    name = "model.layers.1.mlp.up_proj"
    a, b = (engine.parameters[f"{name}.lora_{part}.default.weight"].detach() for part in "AB")
    expected = base[f"{name}.weight"] + 12 / 4 * b @ a
    torch.testing.assert_close(published[f"{name}.weight"], expected)
    assert not torch.equal(expected, base[f"{name}.weight"])
    assert torch.equal(published["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


def test_factors_are_published_instead_of_merged_weights(model_path: Path) -> None:
    options: dict[str, Any] = {"lora": LORA, "loss": cross_entropy(), "temperature": 1.0}
    merging = make_engine(model_path, **options)
    sending = make_engine(model_path, sends_adapters=True, **options)
    step(merging)
    step(sending)
    merged, factors = weights(merging), weights(sending)
    expected = factor_tensors(meta_model(str(model_path)), Lora.parse(LORA))
    assert {name: one.shape for name, one in factors.items()} == {
        name: one.shape for name, one in expected.items()
    }
    shape = model_shape(str(model_path))
    config = ModelConfig(lora=LORA)
    assert sum(one.numel() for one in factors.values()) == num_trained(shape, config)
    base = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    for name in shape.linear_layers:
        a, b = (factors[f"{name}.lora_{part}.weight"] for part in "AB")
        assert bool(b.any())
        added = base[f"{name}.weight"] + 12 / 4 * b @ a
        torch.testing.assert_close(merged[f"{name}.weight"], added)
    step(sending, seed=1)  # the optimizer changes the published tensors themselves
    assert not torch.equal(weights(sending)[f"{name}.lora_A.weight"], a)
    merging.close()
    sending.close()


def test_an_export_names_layers_in_order(engine: FSDPEngine, tmp_path: Path) -> None:
    """Check the order, because PEFT keeps a set, whose order differs between processes."""
    engine.export(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "adapter" / "adapter_config.json").read_text())
    assert len(config["target_modules"]) == 14  # two blocks
    assert config["target_modules"] == sorted(config["target_modules"])


@pytest.mark.parametrize("dtype", rest_slow(["float32", "bfloat16"], only=("bfloat16",)))
def test_a_policy_is_its_own_reference(model_path: Path, dtype: str) -> None:
    made = make_engine(model_path, lora=LORA, loss=cross_entropy(), dtype=dtype)
    rows = make_rows(4)
    begun = made.infer(rows, adapters=False)  # FSDP2 reads requires_grad in its first pass
    step(made)
    trained = made.infer(rows)
    for own, other in zip(made.infer(rows, adapters=False), begun, strict=True):
        assert (own == other).all()
    plain = InferenceEngine(model_path, head="logits", dtype=dtype, temperature=0.8).infer(rows)
    for own, other in zip(begun, plain, strict=True):
        torch.testing.assert_close(torch.from_numpy(own), torch.from_numpy(other))
    assert all((own == other).all() for own, other in zip(made.infer(rows), trained, strict=True))
    assert not any((own == other).all() for own, other in zip(trained, begun, strict=True))
    step(made, seed=1)  # adapters are trained as before
    again = make_engine(model_path, lora=LORA, loss=cross_entropy(), dtype=dtype)
    step(again)
    step(again, seed=1)
    assert_same(weights(made), weights(again), rtol=0, atol=0)
    made.close()
    again.close()


def test_a_model_without_adapters_cannot_disable_them(model_path: Path) -> None:
    made = make_engine(model_path)
    with invalid("model.lora"):
        made.infer(make_rows(1), adapters=False)
    made.close()


def test_a_fresh_adapter_changes_nothing(model_path: Path) -> None:
    """Start at the base, so that a reference with the policy's weights needs no adapter."""
    made = make_engine(model_path, lora=LORA)
    rows = make_rows(4)
    reference = InferenceEngine(model_path, head="logits", temperature=0.8).infer(rows)
    for own, other in zip(made.infer(rows), reference, strict=True):
        torch.testing.assert_close(torch.from_numpy(own), torch.from_numpy(other))
    made.close()


def test_a_checkpoint_has_only_adapters_and_resumes_exactly(
    model_path: Path, engine: FSDPEngine, tmp_path: Path
) -> None:
    whole = make_engine(model_path)
    assert engine.snapshot_bytes(2) < whole.snapshot_bytes(2) / 2
    whole.close()
    assert all("lora_" in name for name in engine.local_state() if name != "rng")
    save(engine, tmp_path / "state")
    step(engine, seed=1)
    other = make_engine(model_path, lora=LORA, loss=cross_entropy(), temperature=1.0, seed=9)
    other.load(tmp_path / "state")
    step(other, seed=1)
    assert_same(weights(other), weights(engine), rtol=0, atol=0)
    other.close()


@pytest.mark.slow
def test_float16_adds_the_scale_of_the_loss(model_path: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"lora": LORA, "dtype": "float16", "loss": cross_entropy()}
    made = make_engine(model_path, **options)
    made.local_state()["buffer.loss_scale"][0] = 2.0**40  # gradients beyond float16
    result = step(made)
    assert result.metrics[metrics.UPDATES_REPEATED] > 0
    save(made, tmp_path / "state")
    other = make_engine(model_path, **options)
    other.load(tmp_path / "state")
    names = made.local_state().keys() - {"rng"}
    assert {"loss_scale" in name or "lora_" in name for name in names} == {True}
    assert_same(whole_state(other), whole_state(made), rtol=0, atol=0)
    assert {tensor.dtype for tensor in made.base.values()} == {torch.float16}
    assert_same(weights(other), weights(made), rtol=0, atol=0)
    other.close()
    made.close()


def test_holdings_cover_model_and_adapters(model_path: Path, engine: FSDPEngine) -> None:
    held = {one.name: one.box.shape for one in engine.holdings}
    base = AutoModelForCausalLM.from_pretrained(model_path)
    expected = {name: tuple(tensor.shape) for name, tensor in base.named_parameters()}
    adapters = {name: shape for name, shape in held.items() if "lora_" in name}
    assert {name: held[name] for name in held.keys() - adapters} == expected
    q_proj = "model.layers.0.self_attn.q_proj"
    assert adapters[f"{q_proj}.lora_A.default.weight"] == (4, 32)
    assert adapters[f"{q_proj}.lora_B.default.weight"] == (32, 4)


def test_a_checkpoint_has_the_estimated_bytes(model_path: Path, engine: FSDPEngine) -> None:
    shape = model_shape(str(model_path))
    # Each of two layers has q (32 to 32), k and v (to 16), o; gate and up (to 48), down.
    assert sum(shape.linear_layers.values()) == 2 * (64 + 48 + 48 + 64 + 3 * 80)
    config = RunConfig(model=ModelConfig(lora=LORA))
    asked = checkpoint_bytes(config, Dataflow(), shape)
    assert asked == 12 * 4 * sum(shape.linear_layers.values())
    assert asked == sum(
        tensor.nbytes
        for name, tensor in engine.local_state().items()
        if name != "rng" and not name.startswith("step.")
    )


def test_only_named_layers_are_adapted(model_path: Path) -> None:
    made = make_engine(model_path, lora="r2:q_proj,mlp.up_proj")
    layers = {name.partition(".lora_")[0].rpartition("layers.")[2] for name in made.parameters}
    assert layers == {f"{i}.{n}" for i in (0, 1) for n in ("self_attn.q_proj", "mlp.up_proj")}
    made.close()


@pytest.mark.parametrize(
    "name", rest_slow(["nothing", "lm_head", "embed_tokens", "q_proj,norm", "q_proj,v_prj"])
)
def test_names_that_are_not_linear_layers_are_rejected(model_path: Path, name: str) -> None:
    with invalid("model.lora"):
        make_engine(model_path, lora=f"r2:{name}")


def critic_row(row: TrainRow) -> TrainRow:
    return replace(row, columns={"returns": row.columns["advantages"]})


def test_a_critic_trains_its_head_and_adapters(model_path: Path, tmp_path: Path) -> None:
    made = make_engine(model_path, lora=LORA, head="value", loss=value_loss())
    for seed in (0, 1):
        train_step(made, [critic_row(row) for row in make_rows(6, seed)])
    made.export(tmp_path / "hf")
    assert [name for name in made.parameters if "lora_" not in name] == ["score.weight"]
    shape = model_shape(str(model_path), "value")
    num_estimated = num_trained(shape, ModelConfig(lora=LORA))
    assert sum(one.numel() for one in made.parameters.values()) == num_estimated
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert bool(merged.score.weight.any())
    theirs = loaded(model_path, tmp_path / "hf", AutoModelForSequenceClassification)
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            merged(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5
        )
    made.close()


def trained(model_path: Path, parts: Sequence[Sequence[TrainRow]], **options: Any) -> Weights:
    made = make_engine(model_path, lora=LORA, **options)
    for _ in range(2):
        accumulate(made, parts)
        made.optimizer_step()
        made.infer(parts[0], adapters=False)  # changes nothing
    found = weights(made)
    made.close()
    return found


def factors_of_a_rank(rank: int, world_size: int, directory: Path) -> Weights:
    share = make_rows(8)[4 * rank : 4 * rank + 4] if world_size > 1 else make_rows(8)
    engine = make_engine(
        directory / "model",
        lora=LORA,
        loss=cross_entropy(),
        sends_adapters=True,
        rank=rank,
        world_size=world_size,
    )
    train_step(engine, share)
    found = weights(engine)
    engine.close()
    return found


@pytest.mark.slow
def test_two_ranks_publish_the_same_factors(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    found, _ = on_ranks(2, factors_of_a_rank, tmp_path)
    assert_same(found, factors_of_a_rank(0, 1, tmp_path), rtol=1e-4, atol=1e-4)


def two_ranks(rank: int, world_size: int, directory: Path) -> dict[str, Weights]:
    shares = {"rank": rank, "world_size": world_size}
    rows = make_rows(8)[4 * rank : 4 * rank + 4]
    return {
        dtype: trained(directory / "model", [rows], dtype=dtype, **shares)
        for dtype in ("float32", "bfloat16")
    }


@pytest.mark.slow
def test_two_ranks_train_the_same_adapters(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    expected = trained(path, [make_rows(8)])
    found, _ = on_ranks(2, two_ranks, tmp_path)
    assert_same(found["float32"], expected, rtol=1e-4, atol=1e-4)
    assert {one.dtype for one in found["bfloat16"].values()} == {torch.bfloat16}
    in_float32 = {name: tensor.float() for name, tensor in found["bfloat16"].items()}
    assert_same(in_float32, expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r16", Lora(rank=16, alpha=32, targets=None)),
        ("r8a4", Lora(rank=8, alpha=4, targets=None)),
        ("r8a4:q_proj,v_proj", Lora(rank=8, alpha=4, targets=("q_proj", "v_proj"))),
    ],
)
def test_a_string_describes_adapters(text: str, expected: Lora) -> None:
    assert Lora.parse(text) == expected == ModelConfig(lora=text).adapters


@pytest.mark.parametrize("text", ["16", "r0", "r8a0", "r8:", "r8a", "r8:q proj"])
def test_a_string_without_a_rank_is_rejected(text: str) -> None:
    with invalid("model.lora", text):
        ModelConfig(lora=text)


def test_a_model_that_is_not_trained_has_none() -> None:
    with invalid("model"):
        RoleConfig(model=ModelConfig(lora="r8"))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", "dp2ep2"])
def test_layouts_that_split_weights_are_rejected(layout: str) -> None:
    model, trainer = ModelConfig(lora="r8"), TrainerConfig(layout=layout)
    for kind in (RunConfig, TrainedRoleConfig):
        with invalid("model.lora"):
            kind(model=model, trainer=trainer)
    RunConfig(model=model, trainer=TrainerConfig(layout="dp2x2"))
