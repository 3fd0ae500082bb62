"""The engine call by call, against plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.algorithms.loss_inputs import LossInputs, TokenLoss
from rlsys.config import ModelConfig, TrainerConfig
from rlsys.config.training_config import Precision
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.tinker_server.api_losses import KINDS, loss_of, weighted_cross_entropy
from rlsys.tinker_server.call_engine import AdamStep, PrimitiveEngine, RecordingLoss, summed
from rlsys.tinker_server.datum_rows import DataRows, ModelLimits, rows_of
from rlsys.tinker_server.protobuf_messages import WireDatum, dense
from rlsys.tinker_server.saved_weights import SequenceScorer, saved_tensors
from rlsys.tinker_server.server_backend import Scores
from tests.engines.published import read_all
from tests.engines.training_harness import VOCABULARY, tiny_model
from tests.errors import invalid

LIMITS = ModelLimits(vocab_size=VOCABULARY, max_context=128)
STEP = AdamStep(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def make(
    model_path: Path, *, lora: str = "", dtype: Precision = "float32", **trainer: Any
) -> PrimitiveEngine:
    return PrimitiveEngine(
        model_path=model_path,
        trainer=TrainerConfig(**trainer),
        model=ModelConfig(lora=lora, dtype=dtype),
        loss=weighted_cross_entropy(),
        aggregation=summed,
        temperature=1.0,
        num_total_steps=1,
        seed=0,
    )


def data(*, aligned: bool = True, count: int = 5, seed: int = 0) -> list[WireDatum]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        tokens = rng.integers(0, VOCABULARY, int(rng.integers(3, 12)))
        targets = tokens[1:] if aligned else rng.integers(0, VOCABULARY, len(tokens) - 1)
        size = len(targets)
        found.append(
            WireDatum(
                token_ids=tokens[:-1].astype(np.int32),
                tensors={
                    "target_tokens": targets.astype(np.int64),
                    "weights": rng.normal(size=size).astype(np.float32),
                    "logprobs": rng.uniform(-4, -2, size).astype(np.float32),
                    "advantages": rng.normal(size=size).astype(np.float32),
                    "sequence_ratio_mask": np.ones(size, np.float32),
                },
            )
        )
    return found


def rows(sent: Sequence[WireDatum], loss: str) -> DataRows:
    names = {"target_tokens", *KINDS[loss].inputs}
    used = [
        replace(one, tensors={name: one.tensors[name] for name in one.tensors.keys() & names})
        for one in sent
    ]
    return rows_of(used, loss, KINDS[loss], LIMITS)


def passed(engine: PrimitiveEngine, sent: Sequence[WireDatum], loss: str, **options: Any) -> Any:
    found = rows(sent, loss)
    (num_targets,) = set(found.num_targets)
    return engine.forward_backward(
        found.rows,
        loss_of(loss, {}),
        num_targets=num_targets,
        **{"backward": True, **options},
    )


def reference(model_path: Path, sent: Sequence[WireDatum]) -> tuple[Any, list[torch.Tensor]]:
    """A plain model, and log-probabilities of all targets, with gradient."""
    model = load_causal_lm(model_path, dtype="float32")
    logprobs = []
    for one in sent:
        logits = model(torch.from_numpy(one.token_ids).long()[None]).logits[0]
        targets = tensor(one, "target_tokens").long()
        logprobs.append(torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0])
    return model, logprobs


def total(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)).sum()


def tensor(one: WireDatum, name: str) -> torch.Tensor:
    return torch.from_numpy(dense(one.tensors[name]))


@pytest.mark.parametrize("aligned", [True, False])
def test_gradient_and_log_probabilities_are_those_of_plain_torch(
    model_path: Path, aligned: bool
) -> None:
    sent = data(aligned=aligned)
    model, expected = reference(model_path, sent)
    loss = total(-lp * tensor(one, "weights") for lp, one in zip(expected, sent, strict=True))
    loss.backward()
    engine = make(model_path, micro_batch_tokens=16)  # several passes
    found = passed(engine, sent, "cross_entropy")
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    for number, one in enumerate(expected):
        np.testing.assert_allclose(found.logprobs[number], one.detach(), atol=1e-5)
    gradients = dict(model.named_parameters())
    for name, parameter in engine.parameters.items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name].grad, atol=1e-4, rtol=1e-3)
    looked = passed(make(model_path), sent, "cross_entropy", backward=False)
    assert looked.loss == pytest.approx(found.loss, rel=1e-5)
    engine.close()


def test_several_targets_of_a_position_count_each_with_its_weight(model_path: Path) -> None:
    (one,) = data(count=1)
    size = len(one.token_ids)
    rng = np.random.default_rng(1)
    targets = rng.integers(0, VOCABULARY, (size, 3))
    weights = rng.normal(size=(size, 3)).astype(np.float32)
    wide = WireDatum(
        token_ids=one.token_ids, tensors={"target_tokens": targets, "weights": weights}
    )
    model = load_causal_lm(model_path, dtype="float32")
    logits = model(torch.from_numpy(one.token_ids).long()[None]).logits[0]
    logprobs = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(targets))
    engine = make(model_path)
    found = passed(engine, [wide], "cross_entropy")
    expected = -(logprobs * torch.from_numpy(weights)).sum()
    assert found.loss == pytest.approx(expected.item(), rel=1e-5)
    padded = found.logprobs[0].reshape(size, 4)  # to a power of two
    np.testing.assert_allclose(padded[:, :3], logprobs.detach(), atol=1e-5)
    engine.close()


def test_a_loss_is_called_once_for_all_targets_of_a_pass() -> None:
    """A call per target would make time and autograd nodes grow with K."""
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]], requires_grad=True)
    calls = []

    def loss(inputs: LossInputs) -> TokenLoss:
        calls.append(inputs)
        return -inputs.column("weights") * inputs.trainer_logprobs, {}

    of_token = torch.tensor([10.0, 20.0])
    recording = RecordingLoss(loss, 3)
    losses, _ = recording(
        LossInputs(
            trainer_logprobs=torch.zeros(2),
            proximal_logprobs=torch.zeros(2),
            sampler_logprobs=of_token,
            advantages=of_token,
            entropy=of_token,
            staleness=torch.tensor([0, 1]),
            row_index=torch.tensor([0, 1]),
            columns={
                "weights": torch.tensor([[1.0, 0.5, 0.0], [2.0, 0.0, -1.0]]),
                "datum": torch.tensor([4.0, 5.0]),
                "targets": torch.zeros(2, 7),
            },
            candidate_logprobs=logprobs,
        )
    )
    # 1 + 0.5 · 2, and 2 · 4 − 6.
    assert losses.tolist() == [2.0, 2.0]
    losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, -0.5, 0.0], [-2.0, 0.0, 1.0]]
    (found,) = calls
    assert found.row_index.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.sampler_logprobs.tolist() == [10.0] * 3 + [20.0] * 3
    output = recording.output()
    assert output.loss == 4.0
    assert {number: one.tolist() for number, one in output.logprobs.items()} == {
        4: [-1.0, -2.0, -3.0],
        5: [-4.0, -5.0, -6.0],
    }


def test_gradients_add_up_and_a_step_is_torchs_adamw(model_path: Path) -> None:
    sent = data()
    model, expected = reference(model_path, sent)
    ratios = [
        torch.exp(lp - tensor(one, "logprobs")) for lp, one in zip(expected, sent, strict=True)
    ]
    loss = total(-r * tensor(one, "advantages") for r, one in zip(ratios, sent, strict=True))
    loss.backward()
    parameters = list(model.parameters())
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, 0.5))
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.0)
    optimizer.step()
    engine = make(model_path)
    passed(engine, sent[:2], "importance_sampling")
    passed(engine, sent[2:], "importance_sampling", backward=False)  # has no effect
    passed(engine, sent[2:], "importance_sampling")
    step = AdamStep(
        learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.0, grad_clip_norm=0.5
    )
    metrics = engine.optim_step(step)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["policy_version"] == 1
    stepped = dict(model.named_parameters())
    for name, parameter in engine.parameters.items():
        torch.testing.assert_close(parameter, stepped[name], atol=1e-5, rtol=1e-4)
    engine.close()


def test_a_step_without_a_gradient_or_with_none_that_is_finite_changes_nothing(
    model_path: Path,
) -> None:
    engine = make(model_path)
    before = {name: one.detach().clone() for name, one in engine.parameters.items()}
    with invalid("optim_step"):
        engine.optim_step(STEP)
    huge = data(count=1)[0]
    dense(huge.tensors["weights"])[:] = 3e38
    for backward in (True, False):
        with pytest.raises(FloatingPointError) as found:
            passed(engine, [huge], "cross_entropy", backward=backward)
        assert "the loss is inf" in str(found.value)
    engine.discard()
    dense(huge.tensors["weights"])[:] = 1e36  # the loss is finite, its gradient is not
    passed(engine, [huge], "cross_entropy")
    with pytest.raises(FloatingPointError) as found:
        engine.optim_step(STEP)
    assert "norm is " in str(found.value)
    passed(engine, data(), "cross_entropy")
    engine.discard()
    with invalid("optim_step"):
        engine.optim_step(STEP)
    assert all(torch.equal(one, before[name]) for name, one in engine.parameters.items())
    assert engine.policy_version == 0
    engine.close()


def test_weights_that_are_not_finite_are_named_as_the_cause(model_path: Path) -> None:
    engine = make(model_path, lora="r4a32")
    passed(engine, data(), "cross_entropy")
    engine.optim_step(replace(STEP, learning_rate=1e38))
    for backward in (True, False):
        with pytest.raises(FloatingPointError) as found:
            passed(engine, data(), "cross_entropy", backward=backward)
        assert "weights are " in str(found.value)
        assert " after optimizer step 1." in str(found.value)
    for parameter in engine.parameters.values():
        parameter.data.fill_(torch.inf)
    with pytest.raises(FloatingPointError) as found:
        passed(engine, data(), "cross_entropy")
    assert "weights are not finite" in str(found.value)
    with pytest.raises(FloatingPointError) as found:
        engine.optim_step(STEP)
    assert "weights are not finite" in str(found.value)
    engine.close()


@pytest.mark.parametrize(
    ("lora", "dtype"), [("r4a32", "float32"), ("r4a32", "bfloat16"), ("", "float32")]
)
def test_samplers_read_the_published_weights(
    model_path: Path, tmp_path: Path, lora: str, dtype: Precision
) -> None:
    engine = make(model_path, lora=lora, dtype=dtype)
    sent = data()
    for _ in range(2):  # B begins as zeros
        passed(engine, sent, "cross_entropy")
        engine.optim_step(STEP)
    engine.save_for_sampler(tmp_path)
    manifest = engine.publish_as(17, ())
    assert manifest is not None
    assert manifest.version == 17
    published = read_all(manifest)
    saved = saved_tensors(model_path, tmp_path, dtype=dtype)
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in published.items())
    atol = 1e-5 if dtype == "float32" else 0.1
    looked = passed(engine, sent, "cross_entropy", backward=False)
    scorer = SequenceScorer(model_path, dtype=dtype, device="cpu", max_tokens=1000)
    scorer.take("v", tmp_path)
    whole = [
        np.append(one.token_ids, dense(one.tensors["target_tokens"])[-1]).astype(np.int32)
        for one in sent
    ]
    scores = scorer.score(whole)
    for number, one in enumerate(scores):
        np.testing.assert_allclose(one.logprobs, looked.logprobs[number], atol=atol)
    with counted_passes() as passes:
        with_top = scorer.score(whole, top_k=2)
    assert passes == [1]
    for one, other in zip(scores, with_top, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=atol)
    top, _ = top_of(with_top[0])
    assert (top[:, 0] >= top[:, 1]).all()
    # Temperature 2: log p_2 = log p / 2 − log(sum of sqrt(p)).
    every, _ = top_of(scorer.score(whole[:1], top_k=VOCABULARY)[0])
    normalizer = np.log(np.exp(every / 2).sum(1, keepdims=True))
    (warmer,) = scorer.score(whole[:1], top_k=VOCABULARY, temperature=2.0)
    warm, token_ids = top_of(warmer)
    np.testing.assert_allclose(warm, every / 2 - normalizer, atol=atol)
    found = warm[token_ids == whole[0][1:, None]]
    np.testing.assert_allclose(warmer.logprobs, found, atol=atol)
    scorer.take("base", None)
    _, base = reference(model_path, sent[:1])
    np.testing.assert_allclose(scorer.score(whole[:1])[0].logprobs, base[0].detach(), atol=atol)
    engine.close()


@contextmanager
def counted_passes() -> Iterator[list[int]]:
    """Yield a list whose only entry counts the forward passes of models."""
    count, look_up = [0], torch.nn.Embedding.forward

    def counted(self: torch.nn.Embedding, token_ids: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return look_up(self, token_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Embedding, "forward", counted)
        yield count


def top_of(scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities [N - 1, k] and ids of the most likely tokens."""
    assert scores.top_k is not None
    return scores.top_k.logprobs, scores.top_k.token_ids


def test_layouts_and_precisions_that_cannot_answer_are_refused(model_path: Path) -> None:
    with invalid("model.dtype", "float16"):
        PrimitiveEngine(model=ModelConfig(dtype="float16"), trainer=TrainerConfig())
    with invalid("trainer.layout", "pp2"):
        PrimitiveEngine(model=ModelConfig(), trainer=TrainerConfig(layout="pp2"))
