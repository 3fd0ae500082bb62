"""Passes of several models over one base model, against passes of each model alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.common.user_functions import FunctionFailed
from rlsys.config import ModelConfig, TrainerConfig
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.training.adapters import FrozenWeights
from rlsys.tinker_server.api_losses import KINDS, loss_of, weighted_cross_entropy
from rlsys.tinker_server.call_engine import PassOutput, PrimitiveEngine, summed
from rlsys.tinker_server.datum_rows import rows_of
from rlsys.tinker_server.protobuf_messages import WireDatum
from rlsys.tinker_server.server_backend import PassRequest
from rlsys.tinker_server.shared_passes import SharedPasses
from scripts.bench.layouts import build_model
from tests.engines.training_harness import VOCABULARY
from tests.errors import invalid
from tests.tiers import rest_slow
from tests.tinker_server.test_engine import LIMITS, STEP, data

# Other ranks, layers and losses. The last targets occur in no other adapter.
LORAS = ("r4a32", "r2a32:q_proj,v_proj", "r8a32", "r3a32:o_proj")
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "gspo")


# Adam divides by the size of the gradient. This epsilon keeps it from enlarging rounding errors.
EPSILON = 1.0


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("dense"), "qwen3")


@pytest.fixture(scope="module")
def dense(dense_path: Path) -> Process:
    """All clients in one process, with B that is not zero."""
    process = Process.of(dense_path, range(len(LORAS)))
    generator = torch.Generator().manual_seed(0)
    for engine in process.engines.values():
        for parameter in engine.trained:
            parameter.data.normal_(std=0.1, generator=generator)
    return process


@dataclass
class Result:
    """The output of a request, and the gradient of its model after it."""

    output: PassOutput | Exception
    gradient: list[torch.Tensor | None]

    def check(self, expected: Result, *, atol: float = 1e-6) -> None:
        """Compare log-probabilities, and the gradient in relation to its largest number."""
        assert isinstance(self.output, PassOutput), self.output
        assert isinstance(expected.output, PassOutput), expected.output
        assert self.output.logprobs.keys() == expected.output.logprobs.keys()
        for number, logprobs in expected.output.logprobs.items():
            np.testing.assert_allclose(self.output.logprobs[number], logprobs, atol=atol, rtol=atol)
        scale = max(1.0, abs(expected.output.loss))
        assert self.output.loss == pytest.approx(expected.output.loss, abs=10 * atol * scale)
        for one, other in zip(self.gradient, expected.gradient, strict=True):
            if one is None or other is None:
                assert one is other
                continue
            scale = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(one, other, atol=5 * atol * scale, rtol=0)


@dataclass
class Process:
    """Engines of one process, by the number of their client."""

    engines: dict[int, PrimitiveEngine]
    passes: SharedPasses

    @classmethod
    def of(
        cls, path: Path, clients: Sequence[int], *, pass_tokens: int = 16384, **model: Any
    ) -> Process:
        frozen = FrozenWeights()
        engines = {
            client: PrimitiveEngine(
                model_path=path,
                trainer=TrainerConfig(micro_batch_tokens=pass_tokens),
                model=ModelConfig(lora=LORAS[client], **model),
                loss=weighted_cross_entropy(),
                aggregation=summed,
                temperature=1.0,
                num_total_steps=1,
                seed=client,
                frozen=frozen,
            )
            for client in clients
        }
        return cls(engines, SharedPasses(next(iter(engines.values())), frozen))

    def run(self, *requests: PassRequest) -> list[PassOutput | Exception]:
        return self.passes.run([(self.engines[int(one.model)], one) for one in requests])

    def gradient(self, client: int) -> list[torch.Tensor | None]:
        return [
            None if one.grad is None else one.grad.clone() for one in self.engines[client].trained
        ]

    def step(self, client: int) -> None:
        rate = 1e-2 / (1 + client)
        self.engines[client].optim_step(replace(STEP, learning_rate=rate, eps=EPSILON))

    def together(self, *requests: PassRequest) -> list[Result]:
        """Return the results of a call with all requests, and discard the gradients."""
        outputs = self.run(*requests)
        return [self._taken(*pair) for pair in zip(requests, outputs, strict=True)]

    def alone(self, request: PassRequest) -> Result:
        """Return the result of a call with this request only."""
        return self.together(request)[0]

    def _taken(self, request: PassRequest, output: PassOutput | Exception) -> Result:
        client = int(request.model)
        gradient = self.gradient(client)
        self.engines[client].discard()
        return Result(output, gradient)


def request(
    client: int, *, loss: str = "", seed: int = 0, count: int = 5, **options: Any
) -> PassRequest:
    loss = loss or LOSSES[client]
    sent = data(count=count + client, seed=10 * client + seed, **options)
    return of_data(client, sent, loss)


def of_data(client: int, sent: Sequence[WireDatum], loss: str) -> PassRequest:
    found = rows_of(sent, loss, KINDS[loss], LIMITS)
    return PassRequest(
        model=str(client),
        rows=found.rows,
        loss=loss_of(loss, {}),
        num_targets=found.num_targets,
        backward=True,
    )


def bloom(directory: Path) -> Path:
    """Write a model whose rows are padded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("bloom", vocab_size=24, hidden_size=32, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "family", rest_slow(["qwen3", "qwen3_moe", "gemma3_text", "deepseek_v3"], 2)
)
def test_models_train_together_as_each_does_alone(tmp_path: Path, family: str) -> None:
    """Three steps, so that differences of the weights would show."""
    path = build_model(tmp_path, family)
    clients = (0, 1, 2) if family != "deepseek_v3" else (0, 2, 3)  # it has no q_proj
    together, alone = Process.of(path, clients), Process.of(path, clients)
    for step in range(3):
        sent = [request(client, seed=step) for client in clients]
        outputs = together.run(*sent)
        assert together.passes.num_passes == step + 1
        for one, output in zip(sent, outputs, strict=True):
            client = int(one.model)
            (expected,) = alone.run(one)
            found = Result(output, together.gradient(client))
            found.check(Result(expected, alone.gradient(client)))
            together.step(client)
            alone.step(client)
            trained = (process.engines[client].trained for process in (together, alone))
            for parameter, other in zip(*trained, strict=True):
                torch.testing.assert_close(parameter, other, atol=1e-6, rtol=0)


def test_the_results_are_those_of_an_engine_with_its_own_layers(dense: Process) -> None:
    """PEFT's layers in a network of its own, as an engine outside of a shared process has them."""
    sent = [request(client) for client in range(len(LORAS))]
    for one, found in zip(sent, dense.together(*sent), strict=True):
        client = int(one.model)
        output = dense.engines[client].forward_backward(
            one.rows, one.loss, num_targets=one.num_targets, backward=True
        )
        found.check(dense._taken(one, output), atol=2e-6)


def test_gradients_are_those_of_weights_with_the_product_added(
    dense: Process, dense_path: Path
) -> None:
    """Against autograd through W + B A · alpha/rank in a plain model."""
    sent = {client: data(count=3, seed=client) for client in (0, 1)}
    results = dense.together(
        *(of_data(client, one, "cross_entropy") for client, one in sent.items())
    )
    for (client, examples), result in zip(sent.items(), results, strict=True):
        engine = dense.engines[client]
        model = load_causal_lm(dense_path, dtype="float32")
        weights = dict(model.named_parameters())
        leaves: dict[int, torch.Tensor] = {}
        for name, product in engine.products.items():
            factors = [one.weight for one in (product.a, product.b)]
            a, b = (one.detach().clone().requires_grad_() for one in factors)
            leaves |= {id(factors[0]): a, id(factors[1]): b}
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + product.scaling * (b @ a)
        total = torch.zeros(())
        for one in examples:
            inputs = torch.from_numpy(one.token_ids).long()[None]
            logits = torch.func.functional_call(model, weights, (inputs,)).logits[0]
            targets = torch.from_numpy(one.tensors["target_tokens"])[:, None]
            logprobs = torch.log_softmax(logits, -1).gather(-1, targets)[:, 0]
            total = total - (logprobs * torch.from_numpy(one.tensors["weights"])).sum()
        total.backward()
        for parameter, gradient in zip(engine.trained, result.gradient, strict=True):
            expected = leaves[id(parameter)].grad
            assert expected is not None
            assert gradient is not None
            scale = float(expected.abs().max())
            torch.testing.assert_close(gradient, expected, atol=1e-5 * scale, rtol=1e-4)


def of_equal_rows(client: int, count: int) -> PassRequest:
    """Return a request with rows of 16 inputs."""
    rng = np.random.default_rng(client)
    found = []
    for _ in range(count):
        tokens = rng.integers(0, VOCABULARY, 17)
        weights = rng.normal(size=16).astype(np.float32)
        tensors: dict[str, Any] = {"target_tokens": tokens[1:], "weights": weights}
        found.append(WireDatum(token_ids=tokens[:-1].astype(np.int32), tensors=tensors))
    return of_data(client, found, "cross_entropy")


def test_rows_of_the_same_length_give_the_same_bits(dense: Process) -> None:
    """Rounding differs only if rows of other lengths change how attention is computed."""
    requests = [of_equal_rows(client, count=6 + client) for client in range(len(LORAS))]
    for one, found in zip(requests, dense.together(*requests), strict=True):
        found.check(dense.alone(one), atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_activations_change_nothing(dense_path: Path, how: str) -> None:
    sent = [request(client) for client in range(3)]
    plain = Process.of(dense_path, range(3)).together(*sent)
    other = Process.of(dense_path, range(3), gradient_checkpointing=how).together(*sent)
    for found, expected in zip(other, plain, strict=True):
        found.check(expected, atol=0)


@pytest.mark.slow
def test_in_bfloat16_models_together_are_as_near_as_models_alone(dense_path: Path) -> None:
    sent = [request(client) for client in range(3)]
    process = Process.of(dense_path, range(3), dtype="bfloat16")
    for one, found in zip(sent, process.together(*sent), strict=True):
        found.check(process.alone(one), atol=0.02)


@pytest.mark.slow
def test_padded_rows_of_several_models(tmp_path: Path) -> None:
    process = Process.of(bloom(tmp_path), (0, 2))
    assert not process.passes.packs
    sent = [request(client, loss="cross_entropy") for client in (0, 2)]
    found = process.together(*sent)
    assert process.passes.num_passes == 1
    for one, result in zip(sent, found, strict=True):
        result.check(process.alone(one))


def test_a_pass_has_whole_units_of_different_requests_up_to_its_tokens(dense_path: Path) -> None:
    """A unit has at most four rows. The first request has units of four and two rows."""
    process = Process.of(dense_path, range(3), pass_tokens=4 * 17)
    sent = [of_equal_rows(client, count) for client, count in enumerate((6, 1, 1))]
    found = process.together(*sent)
    assert process.passes.num_passes == 2
    for one, result in zip(sent, found, strict=True):
        result.check(process.alone(one), atol=0)
    assert process.passes.num_passes == 2 + 4


def test_only_requests_of_one_kind_share_a_pass(dense: Process) -> None:
    """A forward pass keeps no activations, and several targets have another output."""
    sent = [
        request(0),
        replace(request(1), backward=False),
        request(2, loss="cross_entropy", aligned=False),
        request(3),
    ]
    before = dense.passes.num_passes
    found = dense.together(*sent)
    assert dense.passes.num_passes == before + 3
    assert sent[2].num_targets == 1
    assert found[1].gradient == [None] * len(found[1].gradient)
    for one, result in zip(sent, found, strict=True):
        result.check(dense.alone(one))


class _Broken:
    """A loss with an error."""

    needs = ("weights",)
    uses_advantages = False

    def __call__(self, _: Any) -> Any:
        raise KeyError("a moment")


@pytest.mark.parametrize("fault", ["weights", "data", "loss"])
def test_a_request_fails_alone(dense: Process, fault: str) -> None:
    """The others get what they get alone, to the last bit."""
    sent = [request(client, loss="cross_entropy") for client in range(3)]
    expected = [dense.alone(one) for one in sent]
    trained = dense.engines[1].trained
    kept = [one.detach().clone() for one in trained]
    match fault:
        case "weights":
            for parameter in trained:
                parameter.data.fill_(torch.inf)
        case "data":
            huge = data(count=2)
            for one in huge:
                one.tensors["weights"][:] = 3e38
            sent[1] = of_data(1, huge, "cross_entropy")
        case "loss":
            sent[1] = replace(sent[1], loss=_Broken())
    outputs = dense.run(*sent)
    for parameter, before in zip(trained, kept, strict=True):
        parameter.data.copy_(before)
    if fault == "data":  # the step is refused, as for a model alone
        assert isinstance(outputs[1], PassOutput)
        with pytest.raises(FloatingPointError):
            dense.step(1)
    else:
        error = FloatingPointError if fault == "weights" else FunctionFailed
        assert isinstance(outputs[1], error)
        with invalid("optim_step"):
            dense.step(1)
    for client in (0, 2):
        dense._taken(sent[client], outputs[client]).check(expected[client], atol=0)


def test_layers_that_get_some_of_the_inputs_are_found_and_no_pass_is_shared(
    dense_path: Path,
) -> None:
    """Such as experts that are layers, which get the tokens that a router has chosen."""
    process = Process.of(dense_path, (0, 2))
    mlp = process.passes.model.model.layers[0].mlp
    forward = mlp.forward

    def in_halves(x: torch.Tensor) -> torch.Tensor:
        middle = x.shape[1] // 2
        return torch.cat([forward(x[:, :middle]), forward(x[:, middle:])], 1)

    mlp.forward = in_halves
    sent = [request(client) for client in (0, 2)]
    for num_passes in (3, 5):  # one that fails, then each alone
        found = process.together(*sent)
        assert process.passes.num_passes == num_passes
    mlp.forward = forward
    for one, result in zip(sent, found, strict=True):
        result.check(process.alone(one))
