"""Frozen models give the numbers of transformers, for all architectures and packings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from rlsys.algorithms import top_k_distill
from rlsys.engines.inference.frozen_model import InferenceEngine
from rlsys.engines.models.architecture_probe import MODEL_CLASS
from rlsys.engines.models.scalar_lm import load_scalar_lm
from rlsys.engines.models.scalar_network import ScalarNetwork, WholeScorer
from rlsys.launcher.tiny_models import Family
from rlsys.types import MicroBatch, TrainRow
from tests.engines.scalar_models import plain_scores, plain_values, scalar_model, tokens_of
from tests.engines.training_harness import (
    VOCABULARY,
    gradients,
    make_engine,
    make_rows,
    tiny_model,
)
from tests.errors import invalid
from tests.tiers import rest_slow

FAMILIES: tuple[Family, ...] = ("qwen3", "llama", "gemma2", "gemma3")


def plain_distributions(
    directory: Path, row: TrainRow, temperature: float, model: Any = None
) -> torch.Tensor:
    """Return log-probabilities [T, V] at each completion token, with the gradient of `model`."""
    from transformers import AutoModelForCausalLM

    grad = model is not None
    model = model or AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    tokens = tokens_of(row)
    with torch.set_grad_enabled(grad):
        logprobs = torch.log_softmax(model(input_ids=tokens[None]).logits[0] / temperature, -1)
    first = len(row.prompt_token_ids)
    return logprobs[first - 1 : len(tokens) - 1]


def plain_logprobs(directory: Path, row: TrainRow, temperature: float) -> torch.Tensor:
    tokens = torch.from_numpy(row.token_ids).long()
    return plain_distributions(directory, row, temperature).gather(-1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("family", rest_slow(FAMILIES))
def test_log_probabilities_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / family, family)
    rows = make_rows(5)
    rows.insert(2, replace(rows[0], token_ids=rows[0].token_ids[:0], columns={}))
    engine = InferenceEngine(path, head="logits", temperature=0.8, max_tokens=50)
    found = engine.infer(rows)
    assert found[2].shape == (0,)
    for row, logprobs in zip(rows, found, strict=True):
        expected = plain_logprobs(path, row, 0.8)
        np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-5)


def test_a_trained_policy_gives_the_numbers_of_its_frozen_copy(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    rows = make_rows(5)
    frozen = InferenceEngine(path, head="logits", temperature=0.8).infer(rows)
    for one, other in zip(frozen, make_engine(path).infer(rows), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    "kind", rest_slow(["qwen3", "llama", "gemma2", "gemma3_text", "gpt2", "opt"])
)
def test_values_and_scores_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    path = scalar_model(tmp_path / kind, kind)
    rows = [row for row in make_rows(6) if len(row.token_ids)]
    critic = InferenceEngine(path, head="value", max_tokens=50)
    for values, expected in zip(critic.infer(rows), plain_values(path, rows), strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)
    scorer = InferenceEngine(path, head="score", max_tokens=50)
    assert isinstance(scorer.role.network, ScalarNetwork)
    scores = scorer.infer(rows)
    assert {score.shape for score in scores} == {(1,)}
    np.testing.assert_allclose(
        np.concatenate(scores), plain_scores(path, rows), rtol=1e-5, atol=1e-5
    )
    assert np.ptp(scores) > 0.1


@pytest.mark.parametrize("kind", rest_slow(["bert", "roberta", "deberta-v2"]))
def test_models_of_other_kinds_score_as_transformers_runs_them(kind: str, tmp_path: Path) -> None:
    path = scalar_model(tmp_path / kind, kind, type_vocab_size=2)
    rows = make_rows(6)
    scorer = InferenceEngine(path, head="score", max_tokens=50)
    assert isinstance(scorer.role.network, WholeScorer)
    scores = np.concatenate(scorer.infer(rows))
    np.testing.assert_allclose(scores, plain_scores(path, rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pad_token_id", rest_slow([0, None]))
def test_the_score_is_taken_at_the_token_that_transformers_takes(
    pad_token_id: int | None, tmp_path: Path
) -> None:
    """If the end token is also the padding token, the score is taken at the token before it."""
    path = scalar_model(tmp_path, "qwen3", pad_token_id=pad_token_id)
    row = make_rows(1)[0]

    def with_tokens(prompt: list[int], completion: list[int]) -> TrainRow:
        return replace(
            row, prompt_token_ids=np.array(prompt), token_ids=np.array(completion, np.int32)
        )

    rows = [
        with_tokens([5, 6], [7, 8, 0]),
        with_tokens([5, 6], [7, 0, 8, 0, 0]),
        with_tokens([5, 0], [0, 0]),
        with_tokens([0], [0, 0]),
        with_tokens([5, 6, 7], []),
        with_tokens([5], []),
    ]
    scores = np.concatenate(InferenceEngine(path, head="score").infer(rows))
    np.testing.assert_allclose(scores, plain_scores(path, rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pad_token_id", rest_slow([0, None]))
def test_a_decoder_may_score_as_transformers_runs_it(
    pad_token_id: int | None, tmp_path: Path
) -> None:
    path = scalar_model(tmp_path, "qwen3", pad_token_id=pad_token_id)
    rows = make_rows(4)
    scorer = InferenceEngine(path, head="score")
    scorer.role.network = WholeScorer(load_scalar_lm(path, dtype="float32", fresh_head=False))
    scores = np.concatenate(scorer.infer(rows))
    np.testing.assert_allclose(scores, plain_scores(path, rows), rtol=1e-5, atol=1e-5)
    assert scorer.infer([]) == []


def test_no_rows_give_no_arrays(tmp_path: Path) -> None:
    path = scalar_model(tmp_path, "qwen3")
    for head in ("value", "score"):
        assert InferenceEngine(path, head=head).infer([]) == []


def test_a_frozen_model_is_kept_in_its_own_precision_alone(tmp_path: Path) -> None:
    path = scalar_model(tmp_path, "qwen3", head_dim=32)
    rows = make_rows(6)
    for head in ("value", "score"):
        engine = InferenceEngine(path, head=head, dtype="bfloat16")
        parameters = list(engine.role.network.parameters())
        assert {p.dtype for p in parameters} == {torch.bfloat16}
        assert not any(p.requires_grad for p in parameters)
        exact = InferenceEngine(path, head=head).infer(rows)
        for one, other in zip(engine.infer(rows), exact, strict=True):
            np.testing.assert_allclose(one, other, atol=0.2)


def test_models_without_a_scalar_head_are_refused(tmp_path: Path) -> None:
    causal = tiny_model(tmp_path / "causal")
    for head in ("value", "score"):
        with invalid("model.path", str(causal)) as refused:
            InferenceEngine(causal, head=head)
        assert "Qwen3ForCausalLM" in refused.value.rule
    classes = scalar_model(tmp_path / "classes", "qwen3", num_labels=3)
    with invalid("model.path", str(classes)) as refused:
        InferenceEngine(classes, head="score")
    assert "3 outputs" in refused.value.rule
    with invalid("model.path", str(tmp_path / "nothing")):
        InferenceEngine(tmp_path / "nothing", head="score")


@pytest.mark.parametrize("fresh_head", [True, False])
def test_a_head_of_another_kind_is_refused_rather_than_lost(
    fresh_head: bool, tmp_path: Path
) -> None:
    causal = tiny_model(tmp_path / "causal")
    critic = AutoModelForTokenClassification.from_pretrained(causal, num_labels=1)
    critic.save_pretrained(tmp_path / "critic")
    with invalid("model.path", str(tmp_path / "critic")) as refused:
        load_scalar_lm(tmp_path / "critic", dtype="float32", fresh_head=fresh_head)
    assert "Qwen3ForTokenClassification" in refused.value.rule
    bert = scalar_model(tmp_path / "bert", "bert", type_vocab_size=2)
    with invalid(MODEL_CLASS, "BertForSequenceClassification"):
        InferenceEngine(bert, head="value")


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = scalar_model(tmp_path, "qwen3")
    tensors = load_file(path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with invalid("model.path", str(path)) as refused:
        InferenceEngine(path, head="score")
    assert "missing score.weight" in refused.value.rule


def test_a_token_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    row = make_rows(1)[0]
    row.token_ids[-1] = VOCABULARY
    with invalid("token id", VOCABULARY):
        InferenceEngine(tiny_model(tmp_path), head="logits").infer([row])


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_a_row_longer_than_the_context_is_refused(kind: str, tmp_path: Path) -> None:
    row = make_rows(1)[0]
    rows = [replace(row, token_ids=np.full(127 + more, 5, np.int32)) for more in (0, 1)]
    rows = [replace(row, prompt_token_ids=np.full(1, 5, np.int32)) for row in rows]
    path = scalar_model(tmp_path, kind, n_positions=128)
    engine = InferenceEngine(path, head="score")
    assert np.isfinite(engine.infer(rows[:1])[0]).all()
    with invalid("tokens of a row", 129) as refused:
        engine.infer(rows)
    assert "128 tokens" in refused.value.rule


def likeliest(values: np.ndarray, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split an engine's array of a row into ids [T, top_k] and logprobs [T, top_k + 1]."""
    both = torch.from_numpy(values).view(-1, 2 * top_k + 1)
    return both[:, :top_k].long(), both[:, top_k:]


def test_likeliest_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    rows = make_rows(5)
    engine = InferenceEngine(path, head="logits", temperature=0.8, max_tokens=50, top_k=4)
    for row, found in zip(rows, engine.infer(rows), strict=True):
        distributions = plain_distributions(path, row, 0.8)
        expected = distributions.topk(4)
        ids, logprobs = likeliest(found, 4)
        assert torch.equal(ids, expected.indices)
        np.testing.assert_allclose(logprobs[:, :4], expected.values, rtol=1e-5, atol=1e-5)
        others = 1 - expected.values.exp().sum(-1)
        np.testing.assert_allclose(logprobs[:, 4].exp(), others, rtol=1e-4, atol=1e-6)
    with invalid("top_k", 99) as refused:
        InferenceEngine(path, head="logits", top_k=99)
    assert str(VOCABULARY) in refused.value.fix


def test_a_student_learns_from_likeliest_tokens_as_by_autograd(tmp_path: Path) -> None:
    """Use several chunks of logits, and rows with a shared prefix."""
    student, teacher = tiny_model(tmp_path / "student"), tiny_model(tmp_path / "teacher", "llama")
    rows = [row for row in make_rows(6) if len(row.token_ids)]
    rows.append(rows[0])
    distributions = InferenceEngine(teacher, head="logits", top_k=VOCABULARY).infer(rows)
    rows = [
        replace(row, columns={"teacher_top_k": values})
        for row, values in zip(rows, distributions, strict=True)
    ]
    engine = make_engine(student, loss=top_k_distill(), temperature=1.0)
    engine.role.network.chunk_tokens = 7
    engine.accumulate(MicroBatch(rows=rows))
    found = gradients(engine)

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(student, attn_implementation="eager")
    total = torch.zeros(())
    for row in rows:
        p = plain_distributions(student, row, 1.0, model).exp()[row.loss_mask]
        q = plain_distributions(teacher, row, 1.0)[row.loss_mask]
        total = total + (p * (p.log() - q)).sum()
    total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (found[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, (name, error)
