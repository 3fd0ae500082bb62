"""Engines of several models in one process, which share the frozen weights of the base model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.config import ModelConfig, TrainerConfig
from rlsys.config.training_config import Precision
from rlsys.engines.training.adapters import FrozenWeights
from rlsys.engines.training.trainer_state import finish_state
from rlsys.reallocation.transport.shared_memory import SharedMemory
from rlsys.tinker_server.api_losses import weighted_cross_entropy
from rlsys.tinker_server.call_engine import PrimitiveEngine, summed
from rlsys.tinker_server.protobuf_messages import dense
from tests.engines.training_harness import tiny_model
from tests.tinker_server.test_engine import STEP, data, passed

LORAS = ("r4a32", "r2a32:q_proj,v_proj", "r8a32")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def engine_of(
    model_path: Path,
    lora: str,
    seed: int,
    frozen: FrozenWeights | None,
    dtype: Precision = "float32",
) -> PrimitiveEngine:
    return PrimitiveEngine(
        model_path=model_path,
        trainer=TrainerConfig(),
        model=ModelConfig(lora=lora, dtype=dtype),
        loss=weighted_cross_entropy(),
        aggregation=summed,
        temperature=1.0,
        num_total_steps=1,
        seed=seed,
        frozen=frozen,
    )


def trained(engine: PrimitiveEngine) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in engine.parameters.items()}


def train(engine: PrimitiveEngine, seed: int, step: int) -> Any:
    """Take a step on data of this engine, and return its log-probabilities."""
    sent = data(count=6)[seed % 3 :]
    rate = 1e-2 / (1 + seed + step)
    output = passed(engine, sent, "importance_sampling" if seed % 2 else "cross_entropy")
    engine.optim_step(replace(STEP, learning_rate=rate))
    return output.logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_that_share_a_base_train_as_each_does_alone(
    model_path: Path, dtype: Precision
) -> None:
    """To the last bit: each computes the same operations on the same numbers."""
    frozen = FrozenWeights()
    engines = [engine_of(model_path, lora, seed, frozen, dtype) for seed, lora in enumerate(LORAS)]
    together = [
        [train(engine, seed, step) for seed, engine in enumerate(engines)] for step in range(3)
    ]
    places = [one.data_ptr() for one in engines[0].base.values()]
    for engine in engines[1:]:
        assert [one.data_ptr() for one in engine.base.values()] == places
    for seed, lora in enumerate(LORAS):
        alone = engine_of(model_path, lora, seed, FrozenWeights(), dtype)
        for step in range(3):
            found = train(alone, seed, step)
            for number, logprobs in together[step][seed].items():
                np.testing.assert_array_equal(logprobs, found[number])
        shared = trained(engines[seed])
        assert all(torch.equal(shared[name], one) for name, one in trained(alone).items())
    # The engine of a training run computes the same up to rounding.
    plain = engine_of(model_path, LORAS[0], 0, None, dtype)
    first = train(plain, 0, 0)
    for number, logprobs in together[0][0].items():
        atol = 1e-6 if dtype == "float32" else 0.1
        np.testing.assert_allclose(logprobs, first[number], atol=atol)


def test_a_failed_step_a_load_and_an_end_change_no_other_model(
    model_path: Path, tmp_path: Path
) -> None:
    frozen = FrozenWeights()
    first, second, third = (engine_of(model_path, "r4a32", seed, frozen) for seed in range(3))
    for engine in (first, second, third):
        train(engine, 1, 0)
    before = trained(first)
    base = {name: one.clone() for name, one in first.base.items()}
    passed(first, data(), "cross_entropy")  # a gradient that waits for its step
    gradients = {name: one.grad.clone() for name, one in first.parameters.items()}
    # The second one loads the state of the third.
    directory = tmp_path / "state"
    directory.mkdir()
    memory = SharedMemory("rlsys-shared-engines", third.snapshot_bytes(1), purpose="a test")
    held = third.hold(third.open_snapshots(memory.path, memory.name))
    memory.close()
    finish_state(directory, [held.write(directory)])
    second.load_weights(directory, optimizer=True)
    assert all(torch.equal(trained(third)[name], one) for name, one in trained(second).items())
    huge = data(count=1)[0]
    dense(huge.tensors["weights"])[:] = 1e36
    passed(third, [huge], "cross_entropy")
    with pytest.raises(FloatingPointError):
        third.optim_step(STEP)
    third.close()
    second.close()
    assert all(torch.equal(first.base[name], one) for name, one in base.items())
    assert all(torch.equal(trained(first)[name], one) for name, one in before.items())
    for name, one in first.parameters.items():
        assert one.grad is not None
        assert torch.equal(one.grad, gradients[name])
    first.optim_step(STEP)
    assert first.policy_version == 2


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    frozen = FrozenWeights()
    engines = [engine_of(path, "r4a32", seed, frozen) for seed in range(2)]
    for engine in engines:
        head = engine.model.get_output_embeddings().weight
        embedding = engine.model.get_input_embeddings().weight
        assert (head.data_ptr() == embedding.data_ptr()) == config["tie_word_embeddings"]
    first, second = (one.model.get_output_embeddings().weight for one in engines)
    assert first.data_ptr() == second.data_ptr()
