"""One rank: results, versions, publication, checkpoints, exports, and rejected input."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.filesystem import FileSystem

from rlsys.algorithms.aggregation import (
    Aggregation,
    constant_length,
    prompt_mean,
    sequence_mean,
    token_mean,
)
from rlsys.algorithms.loss_inputs import LossInputs, MeanOver, TokenLoss
from rlsys.algorithms.losses import clipped_surrogate, reinforce
from rlsys.common import available_memory
from rlsys.common.atomic_files import DiskError
from rlsys.common.user_functions import FunctionFailed, name_of
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.training.supervised import supervised_row
from rlsys.errors import NOT_GIVEN
from rlsys.launcher.tiny_models import Family
from rlsys.reallocation.transport.shared_memory import MemoryGone
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import MicroBatch, TrainRow
from tests.engines.published import is_there, read_all
from tests.engines.training_harness import (
    VOCABULARY,
    accumulate,
    assert_same,
    assert_same_sums,
    gradients,
    make_engine,
    make_row,
    make_rows,
    save,
    tiny_model,
    train_step,
    weights,
)
from tests.errors import invalid
from tests.tiers import rest_slow


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("engine") / "qwen3")


def reference_logprobs(model_path: Path, row: TrainRow, temperature: float) -> torch.Tensor:
    """Return log-probabilities by transformers alone, one rollout at a time and without padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager")
    tokens = torch.from_numpy(
        np.concatenate([row.prompt_token_ids, row.token_ids]).astype(np.int64)
    )
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0] / temperature
    first = len(row.prompt_token_ids)
    places = torch.arange(first - 1, len(tokens) - 1)
    result: torch.Tensor = torch.log_softmax(logits, -1)[places, tokens[first:]]
    return result


@pytest.mark.parametrize("family", rest_slow(["qwen3", "llama", "gemma2", "gemma3"]))
def test_logprobs_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / family, family)
    rows = make_rows(5)
    found = make_engine(path, micro_batch_tokens=50).infer(rows)
    for row, logprobs in zip(rows, found, strict=True):
        expected = reference_logprobs(path, row, temperature=0.8)
        torch.testing.assert_close(torch.from_numpy(logprobs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "aggregation", [token_mean, sequence_mean, prompt_mean, constant_length(7)]
)
def test_one_step_by_the_definition(model_path: Path, aggregation: Aggregation) -> None:
    """Compute loss and gradient of REINFORCE by hand from a plain model."""
    rows = make_rows(6)
    engine = make_engine(model_path, loss=reinforce(), aggregation=aggregation, max_grad_norm=1e9)
    accumulate(engine, [rows])
    found = gradients(engine)
    result = engine.optimizer_step()

    model = load_causal_lm(model_path, dtype="float32")
    total, denominator = torch.zeros(()), 0.0
    for row in rows:
        tokens = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.token_ids])).long()
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / 0.8
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
        logprobs = logprobs[len(row.prompt_token_ids) - 1 :]
        weight, share = aggregation(row.group_size, row.group_num_tokens, int(row.loss_mask.sum()))
        mask = torch.from_numpy(row.loss_mask)
        advantages = torch.from_numpy(row.columns["advantages"])
        total = total - weight * (logprobs * advantages)[mask].sum()
        denominator += share
    loss = total / denominator
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    found = {name: gradient / denominator for name, gradient in found.items()}
    assert_same(found, expected, rtol=1e-3, atol=1e-5)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("micro_batch_tokens", rest_slow([1, 30, 10_000], only=(30,)))
@pytest.mark.parametrize("split", [[12], [1, 0, 11], [4, 4, 4]])
def test_micro_batches_change_nothing(
    model_path: Path, micro_batch_tokens: int, split: list[int]
) -> None:
    rows = make_rows(12)
    whole, parts = (
        make_engine(model_path),
        make_engine(model_path, micro_batch_tokens=micro_batch_tokens),
    )
    accumulate(whole, [rows])
    bounds = np.cumsum([0, *split])
    accumulate(parts, [rows[a:b] for a, b in pairwise(bounds)])
    assert_same(gradients(parts), gradients(whole), rtol=1e-4, atol=1e-5)
    expected, found = whole.optimizer_step().metrics, parts.optimizer_step().metrics
    assert_same_sums(found, expected)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_order_of_rows_changes_nothing(model_path: Path) -> None:
    rows = make_rows(9)
    forward, backward = make_engine(model_path), make_engine(model_path)
    accumulate(forward, [rows])
    accumulate(backward, [rows[::-1]])
    assert_same(gradients(forward), gradients(backward), rtol=1e-4, atol=1e-5)


def test_two_runs_are_bitwise_equal(model_path: Path) -> None:
    def run() -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        engine = make_engine(model_path)
        results = []
        for seed in range(3):
            results.append(train_step(engine, make_rows(8, seed=seed)).metrics)
        return results, weights(engine)

    (first, first_weights), (again, again_weights) = run(), run()
    assert first == again
    assert_same(first_weights, again_weights, rtol=0, atol=0)


def test_metrics_by_hand(model_path: Path) -> None:
    rows = make_rows(4)
    scored = make_engine(model_path).infer(rows)
    engine = make_engine(model_path)
    engine.policy_version = 3
    result = train_step(engine, rows)

    mask = np.concatenate([row.loss_mask for row in rows])
    sampled = np.concatenate([row.columns["sampler_logprobs"] for row in rows])
    gap = sampled[mask] - np.concatenate(scored)[mask]
    ages = [3 - row.policy_versions[row.loss_mask].min() for row in rows if row.loss_mask.any()]
    assert result.policy_version == engine.policy_version == 4
    assert result.num_tokens == mask.sum()
    assert result.metrics["kl/sampler_trainer"] == pytest.approx(gap.mean(), rel=1e-4)
    k3 = np.exp(-gap) - 1 + gap
    assert result.metrics["kl/sampler_trainer_k3"] == pytest.approx(k3.mean(), rel=1e-4)
    assert result.metrics["staleness/max"] == max(ages)
    assert result.metrics["staleness/mean"] == pytest.approx(np.mean(ages))
    assert 0 < result.metrics["entropy"] < np.log(VOCABULARY)
    assert result.metrics["learning_rate"] == 1e-2


def test_a_step_returns_the_gap_of_each_token_of_recorded_rollouts(model_path: Path) -> None:
    """log μ − log π, with the log-probabilities of the sampler, −3, and of the first pass."""
    rows = make_rows(4)
    recorded = [replace(row, recorded_as=number) for number, row in enumerate(rows)]
    recorded[1] = rows[1]
    scored = make_engine(model_path).infer(rows)
    engine = make_engine(model_path, num_minibatches=2)
    for last in (False, True):  # the second update trains the same rows with other weights
        accumulate(engine, [recorded[:2], recorded[2:]])
        result = engine.optimizer_step(last=last)
    assert sorted(result.gaps) == [(row.group_id, n) for n, row in enumerate(rows) if n != 1]
    for number in (0, 2, 3):
        row = rows[number]
        expected = np.where(row.loss_mask, -3.0 - scored[number], np.nan)
        found = result.gaps[row.group_id, number]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert train_step(engine, rows).gaps == {}


def test_the_loss_sees_one_forward_pass(model_path: Path) -> None:
    seen: list[LossInputs] = []

    def spy(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append(inputs)
        return reinforce()(inputs)

    rng = np.random.default_rng(0)
    row = make_row(rng, num_prompt=2, num_tokens=6)
    make_engine(model_path, loss=spy).accumulate(MicroBatch(rows=[row, row]))
    (inputs,) = seen
    count = int(row.loss_mask.sum())
    assert inputs.row_index.tolist() == [0] * count + [1] * count
    assert inputs.staleness.tolist() == (-row.policy_versions[row.loss_mask]).tolist() * 2
    assert inputs.trainer_logprobs.requires_grad
    assert not inputs.proximal_logprobs.requires_grad
    assert torch.equal(inputs.proximal_logprobs, inputs.trainer_logprobs)


@dataclass(frozen=True)
class Spy:
    """A loss that records its inputs."""

    needs: tuple[str, ...] = ()
    seen: list[LossInputs] = field(default_factory=list)

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.seen.append(inputs)
        return reinforce()(inputs)


def with_columns(row: TrainRow, **columns: list[float]) -> TrainRow:
    found = {name: np.array(values, np.float32) for name, values in columns.items()}
    return replace(row, columns={**row.columns, **found})


def test_the_loss_gets_the_columns_that_it_reads(model_path: Path) -> None:
    """Use rows whose loss masks have gaps, like those of several turns."""
    rng = np.random.default_rng(0)
    rows = [make_row(rng, num_prompt=2, num_tokens=4) for _ in range(2)]
    masks = [[True, False, True, True], [False, True, False, True]]
    rows = [replace(row, loss_mask=np.array(mask)) for row, mask in zip(rows, masks, strict=True)]
    rows[0] = with_columns(rows[0], values=[1, 2, 3, 4], other=[0] * 4)
    rows[1] = with_columns(rows[1], values=[5, 6, 7, 8], other=[0] * 4)
    spy = Spy(needs=("values",))
    engine = make_engine(model_path, loss=spy)
    engine.accumulate(MicroBatch(rows=rows))
    (inputs,) = spy.seen
    assert {name: column.tolist() for name, column in inputs.columns.items()} == {
        "values": [1, 3, 4, 6, 8]
    }
    assert inputs.row_index.tolist() == [0, 0, 0, 1, 1]
    expected = [reference_logprobs(model_path, row, 0.8)[row.loss_mask] for row in rows]
    torch.testing.assert_close(
        inputs.trainer_logprobs.detach(), torch.cat(expected), rtol=1e-4, atol=1e-5
    )
    assert engine.optimizer_step().num_tokens == 5


def test_proximal_logprobs_are_those_of_the_column_where_there_is_one(model_path: Path) -> None:
    row = make_row(np.random.default_rng(0), num_prompt=2, num_tokens=4)
    row = replace(row, loss_mask=np.array([True, True, False, True]))
    spy = Spy()
    engine = make_engine(model_path, loss=spy)
    engine.accumulate(MicroBatch(rows=[with_columns(row, proximal_logprobs=[-1, -2, -3, -4])]))
    assert spy.seen[0].proximal_logprobs.tolist() == [-1, -2, -4]
    # The gap to the sampler's -3 everywhere uses the same log-probabilities.
    assert engine.optimizer_step().metrics["kl/sampler_trainer"] == pytest.approx((-2 - 1 + 1) / 3)


def test_a_missing_column_is_rejected(model_path: Path) -> None:
    rows = make_rows(2)
    engine = make_engine(model_path, loss=Spy(needs=("values",)))
    with invalid("loss Spy(needs=('values',), seen=[]): column", "values") as found:
        engine.accumulate(MicroBatch(rows=rows))
    assert "sampler_logprobs, advantages" in found.value.rule
    rows[0] = replace(rows[0], columns={})
    with invalid(f"loss {name_of(clipped_surrogate(0.2, 0.28))}: column", "sampler_logprobs"):
        make_engine(model_path).accumulate(MicroBatch(rows=rows))
    half = [with_columns(rows[1], proximal_logprobs=[0] * len(rows[1].token_ids)), make_rows(1)[0]]
    with invalid(f"loss {name_of(clipped_surrogate(0.2, 0.28))}: column", "proximal_logprobs"):
        make_engine(model_path).accumulate(MicroBatch(rows=half))


def test_training_raises_the_probability_of_good_tokens(model_path: Path) -> None:
    engine = make_engine(model_path, loss=reinforce())
    row = make_row(np.random.default_rng(0), num_prompt=3, num_tokens=8)
    columns = {**row.columns, "advantages": np.ones(8, np.float32)}
    row = replace(row, columns=columns, loss_mask=np.ones(8, np.bool_))
    before = engine.infer([row])[0].mean()
    for _ in range(5):
        train_step(engine, [row])
    assert engine.infer([row])[0].mean() > before + 0.5


def test_gradients_are_clipped_to_their_norm(model_path: Path) -> None:
    steps = []
    for max_grad_norm in (1e-4, 1e9):
        engine = make_engine(model_path, max_grad_norm=max_grad_norm)
        steps.append(train_step(engine, make_rows(4)).metrics["grad_norm"])
        moments = torch.cat([s["exp_avg"].flatten() for s in engine.optimizer.state.values()])
        norm = float(moments.norm()) / 0.1  # Adam's first moment after one step is (1 − β₁) g
        assert norm == pytest.approx(min(max_grad_norm, steps[-1]), rel=1e-2)
    assert steps[0] == pytest.approx(steps[1])


def test_rows_without_trained_tokens_are_counted_and_not_run(model_path: Path) -> None:
    rows = make_rows(3)
    silent = replace(rows[0], loss_mask=np.zeros(len(rows[0].token_ids), np.bool_))
    with_silent = make_engine(model_path, aggregation=sequence_mean)
    without = make_engine(model_path, aggregation=sequence_mean)
    accumulate(with_silent, [[*rows, silent]])
    accumulate(without, [rows])
    found, expected = with_silent.optimizer_step(), without.optimizer_step()
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"] * 3 / 4)
    assert found.num_tokens == expected.num_tokens


def test_warm_start_fits_examples_and_leaves_no_trace_in_the_optimizer(model_path: Path) -> None:
    engine = make_engine(model_path)
    examples = [[3, 4, 5, 6, 7], [8, 9, 10]]
    losses = [engine.sft_step(examples, [2, 1], learning_rate=1e-2) for _ in range(20)]
    rows = [supervised_row(tokens, length) for tokens, length in zip(examples, [2, 1], strict=True)]
    logprobs = make_engine(model_path, temperature=1.0).infer(rows)
    by_hand = [-float(row.sum()) for row in logprobs]
    assert losses[0] == pytest.approx(sum(by_hand) / 5, rel=1e-4)
    assert losses[-1] < losses[0] / 2
    assert engine.policy_version == 0
    assert engine.optimizer.state
    engine.reset_optimizer()
    assert not engine.optimizer.state


def test_published_weights_are_the_models_own(model_path: Path) -> None:
    engine = make_engine(model_path)
    manifest = engine.publish()
    assert manifest is not None
    assert manifest.version == 0
    parameters = dict(load_causal_lm(model_path, dtype="float32").named_parameters())
    published = read_all(manifest)
    assert published.keys() == parameters.keys()
    assert "lm_head.weight" not in published  # tied to the embedding
    for name, tensor in published.items():
        assert torch.equal(tensor, parameters[name])
    engine.close()


def test_the_newest_version_is_kept(model_path: Path) -> None:
    engine = make_engine(model_path)
    manifests = []
    for seed in range(4):
        manifests.append(engine.publish())
        accumulate(engine, [make_rows(2, seed=seed)])
        assert [m.version for m in manifests if m and is_there(m)] == [seed]
        engine.optimizer_step()
        # One float32 rank publishes its weights in place.
        assert not any(m and is_there(m) for m in manifests)
    engine.publish()
    engine.close()
    engine.close()
    assert not any(m and is_there(m) for m in manifests)


def test_a_reader_keeps_an_opened_version_and_a_late_one_gets_an_error(model_path: Path) -> None:
    engine = make_engine(model_path)
    first = engine.publish()
    assert first is not None
    before = read_all(first)
    with Weights(first) as own:
        for seed in range(2):
            train_step(engine, make_rows(2, seed=seed))
            engine.publish()
        with pytest.raises(MemoryGone):
            Weights(first)
        assert_same(read_all(own.local), before, rtol=0, atol=0)
    engine.close()


def test_missing_memory_for_versions_fails_at_the_start(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available_memory, "available_bytes", lambda root: 2**28 + 1000)
    with pytest.raises(OSError) as found:  # noqa: PT011 - asserted below
        make_engine(model_path)
    assert "a version of the weights" in str(found.value)
    assert found.value.errno == errno.ENOMEM


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_resumed_run_continues_exactly(model_path: Path, tmp_path: Path, moments: str) -> None:
    def step(engine_index: int, seed: int) -> dict[str, float]:
        accumulate(engines[engine_index], [make_rows(4, seed=seed)])
        return engines[engine_index].optimizer_step().metrics

    options = {"schedule": "cosine", "weight_decay": 0.1, "optimizer_state": moments}
    engines = [make_engine(model_path, **options), make_engine(model_path, **options)]
    step(0, seed=0)
    save(engines[0], tmp_path / "saved")
    drawn = torch.rand(3)
    engines[1].load(tmp_path / "saved")
    assert torch.equal(torch.rand(3), drawn)
    assert engines[1].policy_version == 1
    assert step(0, seed=1) == step(1, seed=1)
    assert_same(weights(engines[0]), weights(engines[1]), rtol=0, atol=0)


def test_a_checkpoint_of_another_model_is_rejected(model_path: Path, tmp_path: Path) -> None:
    save(make_engine(model_path), tmp_path / "saved")
    other = make_engine(tiny_model(tmp_path / "llama", "llama"))
    before = weights(other)
    (tmp_path / "saved" / "kept").touch()
    with invalid(str(tmp_path)):
        other.load(tmp_path)
    assert_same(weights(other), before, rtol=0, atol=0)
    gemma = make_engine(tiny_model(tmp_path / "gemma3", "gemma3"))
    with invalid(str(tmp_path / "saved")):
        gemma.load(tmp_path / "saved")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_a_hugging_face_checkpoint(
    model_path: Path, tmp_path: Path, dtype: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = make_engine(model_path, dtype=dtype)
    train_step(engine, make_rows(4))
    for _ in range(2):  # the second replaces the first
        engine.export(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    exported = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert_same(exported, weights(engine), rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.encode("1+2=") == AutoTokenizer.from_pretrained(model_path).encode("1+2=")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


class FullAfter:
    """A stream to a disk with room for this many bytes."""

    def __init__(self, stream: Any, num_bytes: int) -> None:
        self._stream = stream
        self._left = num_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: Any) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._stream.write(data))


def test_a_checkpoint_on_a_full_disk_raises_oserror(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FileSystem.create_stream

    @contextlib.contextmanager
    def full(self: FileSystem, path: Path, mode: str) -> Any:
        with real(self, path, mode) as stream:
            yield FullAfter(stream, 2000)

    monkeypatch.setattr(FileSystem, "create_stream", full)
    with pytest.raises(OSError) as raised:  # noqa: PT011 - asserted below
        save(make_engine(model_path), tmp_path / "saved")
    assert raised.value.errno == errno.ENOSPC


def test_an_export_to_a_full_disk_raises_oserror_and_leaves_nothing(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        message = "Error while serializing: I/O error: No space left on device (os error 28)"
        raise SafetensorError(message)

    engine = make_engine(model_path)
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(DiskError) as found:
        engine.export(tmp_path / "hf")
    assert str(tmp_path / "hf") in str(found.value)
    assert found.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(model_path: Path) -> None:
    engine = make_engine(model_path)
    before = weights(engine)
    rows = make_rows(2)
    rows[0].columns["advantages"][:] = np.inf
    accumulate(engine, [rows])
    with pytest.raises(FloatingPointError) as found:
        engine.optimizer_step()
    assert "optimizer step 1" in str(found.value)
    assert engine.policy_version == 0
    assert_same(weights(engine), before, rtol=0, atol=0)
    accumulate(engine, [make_rows(2, seed=1)])
    assert np.isfinite(engine.optimizer_step().metrics["loss"])


def test_a_step_without_rows_is_rejected(model_path: Path) -> None:
    engine = make_engine(model_path)
    with invalid("loss_mask"):
        engine.optimizer_step()
    accumulate(engine, [[]])
    with invalid("loss_mask"):
        engine.optimizer_step()


@pytest.mark.parametrize("aggregation", rest_slow([token_mean, sequence_mean, constant_length(8)]))
def test_a_step_of_rollouts_without_trained_tokens_leaves_the_weights(
    model_path: Path, aggregation: Aggregation
) -> None:
    engine, twin = (make_engine(model_path, aggregation=aggregation) for _ in range(2))
    before = weights(engine)
    masked = [
        replace(row, loss_mask=np.zeros_like(row.loss_mask), group_num_tokens=0)
        for row in make_rows(2)
    ]
    none = make_row(np.random.default_rng(0), num_prompt=1, num_tokens=0)
    for rows in (masked, [replace(none, group_num_tokens=0)]):
        result = train_step(engine, rows)
        assert result.metrics["loss"] == result.metrics["grad_norm"] == 0.0
        assert result.num_tokens == 0
    assert engine.policy_version == 2
    assert_same(weights(engine), before, rtol=0, atol=0)
    # Nor do such steps change the optimizer's moments: the next step is its first.
    for one in (engine, twin):
        train_step(one, make_rows(2, seed=1))
    assert_same(weights(engine), weights(twin), rtol=0, atol=0)


def test_a_supervised_step_within_a_batch_is_rejected(model_path: Path) -> None:
    engine = make_engine(model_path)
    accumulate(engine, [make_rows(1)])
    with invalid("sft_step"):
        engine.sft_step([[1, 2]], [1])


def test_a_loss_that_is_already_a_mean_is_rejected(model_path: Path) -> None:
    def mean_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -inputs.trainer_logprobs.mean(), {}

    def mean_metric(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -inputs.trainer_logprobs, {"my/metric": inputs.entropy.mean()}

    rows = MicroBatch(rows=make_rows(2))
    with invalid("loss mean_loss: loss") as found:
        make_engine(model_path, loss=mean_loss).accumulate(rows)
    assert "shape ()" in found.value.rule
    with invalid("loss mean_metric: my/metric") as found:
        make_engine(model_path, loss=mean_metric).accumulate(rows)
    assert "shape ()" in found.value.rule


def test_an_error_in_a_custom_loss_names_the_loss(model_path: Path) -> None:
    with pytest.raises(FunctionFailed) as failed:
        make_engine(model_path, loss=raising).accumulate(MicroBatch(rows=make_rows(2)))
    first_line, _, _ = str(failed.value).partition("\n")
    assert first_line.startswith("loss raising raised ")
    assert "'advantage'" in first_line


def raising(inputs: LossInputs) -> Any:
    return -inputs.column("advantage"), {}


def alone(inputs: LossInputs) -> Any:
    return -inputs.trainer_logprobs


def detached(inputs: LossInputs) -> Any:
    return -inputs.trainer_logprobs.detach(), {}


def a_number(inputs: LossInputs) -> Any:
    return -inputs.trainer_logprobs, {"my/number": 0.5}


def matrix(inputs: LossInputs) -> Any:
    return -inputs.trainer_logprobs, {"my/mean": MeanOver(inputs.entropy[:, None])}


def telling(name: Any) -> Any:
    def loss(inputs: LossInputs) -> TokenLoss:
        return -inputs.trainer_logprobs, {name: inputs.entropy.detach()}

    return loss


RESERVED = [
    "grad_norm",
    "loss",
    "step",
    "learning_rate",
    "staleness/max",
    "entropy",
    "kl/sampler_trainer",
    "reward/mean",
    "prompts",
]


@pytest.mark.parametrize(
    ("loss", "field", "value", "part"),
    rest_slow(
        [
            (alone, "loss alone", NOT_GIVEN, "a tensor of shape ("),
            (detached, "loss detached", NOT_GIVEN, "inputs.trainer_logprobs"),
            (a_number, "loss a_number: my/number", NOT_GIVEN, "0.5 (float)"),
            (matrix, "loss matrix: metric", "my/mean", "MeanOver"),
            *((telling(name), "loss loss: metric", name, f"'my/{name}'") for name in RESERVED),
            (telling(3), "loss loss: metric", 3, ""),
            (telling(""), "loss loss: metric", "", ""),
            (lambda inputs: None, "loss <lambda>", NOT_GIVEN, "None (NoneType)"),
            (
                lambda inputs: (inputs.entropy, inputs.entropy),
                "loss <lambda>",
                NOT_GIVEN,
                "(a tensor of shape (25,), a tensor of shape (25,))",
            ),
        ],
        first=5,
    ),
)
def test_an_unusable_result_of_a_custom_loss_is_rejected(
    model_path: Path, loss: Any, field: str, value: Any, part: str
) -> None:
    with invalid(field, value) as found:
        make_engine(model_path, loss=loss).accumulate(MicroBatch(rows=make_rows(2)))
    assert part in str(found.value)


def test_errors_of_a_custom_aggregation_name_the_aggregation(model_path: Path) -> None:
    def half(group_size: int, group_num_tokens: int, row_num_tokens: int) -> Any:
        return 0.5

    def ratio(group_size: int, group_num_tokens: int, row_num_tokens: int) -> Any:
        return 1 / (row_num_tokens - row_num_tokens), 1.0

    rows = MicroBatch(rows=make_rows(2))
    with invalid("aggregation half") as found:
        make_engine(model_path, aggregation=half).accumulate(rows)
    assert "0.5 (float)" in found.value.rule
    with pytest.raises(FunctionFailed) as failed:
        make_engine(model_path, aggregation=ratio).accumulate(rows)
    assert str(failed.value).startswith("aggregation ratio raised ZeroDivisionError")


def test_a_metric_may_be_a_mean_over_rollouts(model_path: Path) -> None:
    """Take the mean over rollouts of any length and in any micro-batches."""

    def loss(inputs: LossInputs) -> TokenLoss:
        lengths = inputs.row_index.bincount().float()
        return -inputs.trainer_logprobs, {"my/length": MeanOver(lengths)}

    rows = make_rows(5)
    engine = make_engine(model_path, loss=loss)
    accumulate(engine, [rows[:1], rows[1:], []])
    lengths = [int(row.loss_mask.sum()) for row in rows]
    assert len(set(lengths)) > 1
    expected = sum(lengths) / sum(length > 0 for length in lengths)
    assert engine.optimizer_step().metrics["my/length"] == pytest.approx(expected)


def test_several_ranks_need_a_process_group(model_path: Path) -> None:
    with invalid("world_size", 2):
        make_engine(model_path, world_size=2)
