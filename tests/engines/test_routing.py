"""Recorded and replayed experts, compared with transformers with forced routers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.store.row_transfer import read_rows
from rlsys import metrics
from rlsys.algorithms.losses import cross_entropy
from rlsys.controller.worker_protocols import StepRowsRef
from rlsys.dataflow.store.blocks import BlockRef, ColumnRef, layout_of, read_column, write_block
from rlsys.engines.generation.continuation import continued, merged
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.collate import collate
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.models.routing import replayable_routing
from rlsys.reallocation.transport.weight_views import open_verified
from rlsys.types import Generation, GenerationRequest, MicroBatch, TrainRow
from scripts.bench.layouts import build_model
from tests.engines import published
from tests.engines.torch_engine_harness import batch_of, request, run
from tests.engines.training_harness import gradients, make_engine
from tests.errors import invalid
from tests.tiers import rest_slow

PROMPT, OTHER = (3, 9, 4, 17, 5), (8, 8, 20)
NUM_LAYERS, NUM_CHOSEN = 2, 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Return a group of three, and one of another prompt, which end at different times."""
    return [
        request("a", PROMPT, seed=1, max_tokens=9),
        request("b", PROMPT, seed=2, max_tokens=4),
        request("c", PROMPT, seed=3, max_tokens=7),
        request("d", OTHER, seed=4, max_tokens=6),
    ]


@pytest.fixture(scope="module")
def sampled(path: Path, requests: list[GenerationRequest]) -> dict[str, Generation]:
    return run(recording(path), requests)


def recording(path: Path) -> Any:
    return batch_of(load_causal_lm(path, dtype="float32"), records_routing=True)


def plain(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


def own_choice(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Return the experts [T, L·K] of one forward pass of a plain model."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.cat(chosen, -1).numpy()


def forced(model: Any, row: TrainRow) -> torch.Tensor:
    """Return log-probabilities [T] of a plain model with forced experts.

    Their weights are the softmax over all experts, renormalised, as in Qwen3-MoE.
    """
    assert row.routed_experts is not None
    tokens = np.concatenate((row.prompt_token_ids, row.token_ids))
    experts = torch.from_numpy(row.routed_experts.astype(np.int64))
    experts = experts.view(len(tokens) - 1, NUM_LAYERS, NUM_CHOSEN)

    def router(gate: Any, chosen: torch.Tensor) -> Any:
        def forward(hidden: torch.Tensor) -> Any:
            logits = hidden @ gate.weight.T
            weights = logits.softmax(-1)[torch.arange(len(chosen))[:, None], chosen]
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        return forward

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.forward = router(layer.mlp.gate, experts[:, number])
    logits = model(input_ids=torch.tensor(tokens[None, :-1].astype(np.int64))).logits[0]
    for layer in model.model.layers:
        del layer.mlp.gate.forward
    targets = torch.tensor(tokens[1:].astype(np.int64))
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return logprobs[len(row.prompt_token_ids) - 1 :]


def rows_of(
    requests: Sequence[GenerationRequest], sampled: Mapping[str, Generation]
) -> list[TrainRow]:
    rows = []
    for number, one in enumerate(requests):
        generation = sampled[one.request_id]
        assert generation.routed_experts is not None
        length = len(generation.token_ids)
        rows.append(
            TrainRow(
                prompt_token_ids=np.array(one.prompt_token_ids, np.int32),
                token_ids=generation.token_ids,
                policy_versions=generation.policy_versions,
                loss_mask=np.ones(length, np.bool_),
                columns={
                    "sampler_logprobs": generation.sampler_logprobs,
                    "advantages": np.full(length, number - 1.5, np.float32),
                },
                group_id=int(one.prompt_token_ids == OTHER),
                group_size=3,
                group_num_tokens=20,
                routed_experts=generation.routed_experts.flatten(),
            )
        )
    return rows


@pytest.fixture(scope="module")
def perturbed(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model with other routers, which choose other experts."""
    model = load_causal_lm(path, dtype="float32")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    directory = tmp_path_factory.mktemp("perturbed")
    model.save_pretrained(directory)
    return directory


def test_recorded_is_the_routing_of_a_whole_pass(
    path: Path, requests: list[GenerationRequest], sampled: dict[str, Generation]
) -> None:
    model = plain(path)
    for one in requests:
        generation = sampled[one.request_id]
        inputs = [*one.prompt_token_ids, *generation.token_ids.tolist()][:-1]
        assert generation.routed_experts is not None
        assert generation.routed_experts.dtype == np.uint8
        np.testing.assert_array_equal(generation.routed_experts, own_choice(model, inputs))


def test_tokens_keep_their_experts_over_new_weights_and_another_replica(
    path: Path, perturbed: Path, requests: list[GenerationRequest], sampled: dict[str, Generation]
) -> None:
    first, second = recording(path), recording(perturbed)
    first.submit(requests)
    first.step()
    first.step()  # b has one token left to sample
    prior = {one.request_id: one for one in first.progress()}
    # New weights in the middle: recorded experts are kept.
    tensors = model_tensors(load_causal_lm(perturbed, dtype="float32"))
    weights = open_verified(published.publish(1, tensors.items()), tensors)
    first.load(weights, first.prepare(weights))
    went_on: dict[str, Generation] = {}
    while first.has_work:
        went_on |= {one.request_id: one for one in first.step()}
    rests = run(second, [continued(one, prior[one.request_id]) for one in requests])
    for one in requests:
        before = prior[one.request_id].routed_experts
        assert before is not None
        expected = sampled[one.request_id].routed_experts
        assert expected is not None
        np.testing.assert_array_equal(before, expected[: len(before)])
        elsewhere = merged(prior[one.request_id], rests[one.request_id])
        for whole in (went_on[one.request_id], elsewhere):
            assert whole.routed_experts is not None
            assert len(whole.routed_experts) == len(one.prompt_token_ids) + len(whole.token_ids) - 1
            np.testing.assert_array_equal(whole.routed_experts[: len(before)], before)
        rest = rests[one.request_id].routed_experts
        assert rest is not None
        assert not np.array_equal(rest[: len(before)], before)  # its own choice differs
        np.testing.assert_array_equal(elsewhere.routed_experts[len(before) :], rest[len(before) :])  # type: ignore[index]


def test_the_trainer_follows_the_sampler_where_it_would_choose_others(
    perturbed: Path, requests: list[GenerationRequest], sampled: dict[str, Generation]
) -> None:
    rows = rows_of(requests, sampled)
    engine, model = make_engine(perturbed, temperature=1.0), plain(perturbed)
    with torch.no_grad():
        expected = [forced(model, row).numpy() for row in rows]
    for found, own in zip(engine.infer(rows), expected, strict=True):
        np.testing.assert_allclose(found, own, atol=1e-5)
    unled = engine.infer([replace(row, routed_experts=None) for row in rows])
    for row, found, followed in zip(rows, unled, expected, strict=True):
        inputs = np.concatenate((row.prompt_token_ids, row.token_ids))[:-1]
        own_experts = own_choice(model, inputs.tolist())
        assert row.routed_experts is not None
        assert (own_experts.flatten() != row.routed_experts).mean() > 0.1
        as_itself = forced(model, replace(row, routed_experts=own_experts.flatten()))
        np.testing.assert_allclose(found, as_itself.detach(), atol=1e-5)
        assert np.abs(found - followed).max() > 0.01
    engine.close()


@pytest.mark.parametrize("recomputed", rest_slow(["none", "selective", "full"]))
def test_the_gradient_is_that_of_the_forced_model(
    recomputed: str,
    perturbed: Path,
    requests: list[GenerationRequest],
    sampled: dict[str, Generation],
) -> None:
    rows = rows_of(requests, sampled)
    model = plain(perturbed)
    for row in rows:
        (-forced(model, row).sum()).backward()
    engine = make_engine(
        perturbed,
        temperature=1.0,
        loss=cross_entropy(),
        gradient_checkpointing=recomputed,
        micro_batch_tokens=30,
    )
    engine.accumulate(MicroBatch(rows=rows))
    found = gradients(engine)
    expected = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert any("gate.weight" in name for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-5, rtol=1e-4, msg=name)
    engine.close()


class Memory:
    """The read interface of the store."""

    def __init__(self, arena: Any) -> None:
        self._arena = arena

    def get_batch(self, cells: Mapping[str, Sequence[ColumnRef]]) -> dict[str, list[Any]]:
        return {name: read_column(self._arena, of, name) for name, of in cells.items()}


def test_a_group_goes_through_the_store_into_a_step(
    path: Path, requests: list[GenerationRequest], sampled: dict[str, Generation]
) -> None:
    group = rows_of(requests[:3], sampled)
    fields = ("prompt_token_ids", "token_ids", "policy_versions", "routed_experts")
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in group] for name in fields}
    columns["sampler_logprobs"] = [row.columns["sampler_logprobs"] for row in group]
    layout = layout_of(columns)
    # 4 numbers of 4 bytes per token, and L·K bytes of experts per input.
    lengths = np.array([len(row.token_ids) for row in group])
    of_experts = (5 + lengths - 1) * NUM_LAYERS * NUM_CHOSEN
    assert layout.row_bytes() == (4 * (5 + 3 * lengths) + of_experts).tolist()
    arena = np.zeros(layout.num_bytes, np.uint8)
    write_block(arena, 0, layout, columns)
    block = BlockRef("shard", 0, 0, layout)
    cells = [(block, place) for place in range(3)]
    step_rows = StepRowsRef(
        cells=dict.fromkeys(columns, cells),
        scalars={"advantages": [1.0, -1.0, 0.5]},
        group_ids=[0] * 3,
        group_sizes=[3] * 3,
        group_num_tokens=[int(lengths.sum())] * 3,
    )
    rows = read_rows(step_rows, Memory(arena))  # type: ignore[arg-type]
    batch = collate(rows)
    assert batch.input_ids.shape[1] <= 5 + (lengths - 1).sum()  # the prompt is stored once
    engine = make_engine(path, temperature=1.0, micro_batch_tokens=64)
    engine.accumulate(MicroBatch(rows=rows))
    result = engine.optimizer_step()
    assert result.metrics[metrics.KL_SAMPLER_TRAINER] == pytest.approx(0, abs=1e-5)
    assert result.metrics[metrics.GRAD_NORM] > 0
    engine.close()


def test_completion_tokens_with_other_experts_are_not_shared() -> None:
    """Two rows have the tokens 1 2 | 3 4 5, stored once if their experts are equal.

    Token 4 is stored twice if its experts differ. A shared prompt has the first row's experts.
    """
    tokens = np.array([3, 4, 5], np.int32)
    experts = np.arange(8, dtype=np.uint8)  # 2 for each of 4 inputs

    def row(experts: np.ndarray) -> TrainRow:
        return TrainRow(
            prompt_token_ids=np.array([1, 2], np.int32),
            token_ids=tokens,
            policy_versions=np.zeros(3, np.int32),
            loss_mask=np.ones(3, np.bool_),
            columns={},
            group_id=0,
            group_size=2,
            group_num_tokens=6,
            routed_experts=experts,
        )

    def inputs(*experts: np.ndarray) -> list[tuple[int, list[int]]]:
        batch = collate([row(one) for one in experts])
        assert batch.routed_experts is not None
        return list(zip(batch.input_ids[0].tolist(), batch.routed_experts.tolist(), strict=True))

    once = [(1, [0, 1]), (2, [2, 3]), (3, [4, 5]), (4, [6, 7])]
    assert inputs(experts, experts) == once
    other = experts.copy()
    other[0], other[7] = 9, 0
    assert sorted(inputs(experts, other)) == sorted([*once, (4, [6, 0])])
    with invalid("routed_experts", [8, 4]) as refused:
        collate([row(experts), row(experts[:4])])
    assert "[4, 4]" in refused.value.rule


def test_models_whose_routing_cannot_be_replayed_are_refused() -> None:
    from transformers import AutoConfig

    routing = replayable_routing(AutoConfig.for_model("qwen3_moe", num_experts=300))
    assert (routing.width, routing.dtype) == (24 * 8, np.dtype(np.int16))
    for name, kind in (("qwen3", "Qwen3ForCausalLM"), ("phimoe", "PhimoeForCausalLM")):
        with invalid("rollout.replay_routing") as refused:
            replayable_routing(AutoConfig.for_model(name))
        assert kind in refused.value.rule
