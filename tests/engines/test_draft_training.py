"""A head that is trained along: the same drafts as in an engine, and an unchanged policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from rlsys import metrics
from rlsys.config.speculation import Speculation
from rlsys.engines.models.collate import CollatedBatch, collate
from rlsys.engines.models.eagle_head import (
    MASK,
    OUTPUT,
    PUBLISHED,
    TOKENS,
    HeadSizes,
    HeadWeights,
    new_config,
    published_head,
)
from rlsys.engines.models.weight_files import lazy_tensors
from rlsys.engines.training import draft_layout as layout_module
from rlsys.engines.training.draft_layout import DraftLayout, draft_layout
from rlsys.engines.training.draft_network import DraftNetwork
from rlsys.engines.training.draft_training import SAVED_AS, STEP_WEIGHT
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.types import StepResult, TrainRow
from scripts.ranks import on_ranks
from tests.engines.draft_reference import ReferenceHead
from tests.engines.published import read_all
from tests.engines.training_harness import (
    VOCABULARY,
    accumulate,
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "policy")


def options(**values: Any) -> Speculation:
    found = Speculation.of({"method": "eagle3", "trained_along": True, **values}, "vllm")
    assert found is not None
    return found


def row(prompt: list[int], tokens: list[int], *, mask: list[int] | None = None) -> TrainRow:
    num = len(tokens)
    return TrainRow(
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        policy_versions=np.zeros(num, np.int32),
        loss_mask=np.array([1] * num if mask is None else mask, bool),
        columns={
            "sampler_logprobs": np.full(num, -3.0, np.float32),
            "advantages": np.ones(num, np.float32),
        },
        group_id=0,
        group_size=2,
        group_num_tokens=2 * num,
    )


def layout_of(batch: CollatedBatch) -> DraftLayout:
    found = draft_layout(batch)
    assert found is not None
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_queries_are_the_trained_tokens_after_the_first(packed: bool) -> None:
    # Inputs 5 6 7 8; the policy is trained at 6 and 7 (they predict 7 and 8), not at 8.
    batch = collate([row([5, 6], [7, 8, 9], mask=[1, 1, 0])], packed=packed)
    layout = layout_of(batch)
    tokens = batch.input_ids.flatten()
    assert tokens[layout.places].tolist() == [6, 7, 8]
    assert tokens[layout.parents].tolist() == [5, 6, 7]
    assert layout.positions.tolist() == [0, 1, 2]
    assert layout.queries.tolist() == [0, 1]
    assert layout.before.tolist() == [-1, 0]
    (piece,) = layout.pieces
    assert piece.keys.tolist() == [[0, 1]]
    assert piece.queries.tolist() == [[0, 1]]
    assert piece.columns.tolist() == [[0, 1]]


def test_a_shared_prefix_is_one_node_for_all_rows() -> None:
    batch = collate([row([1, 2, 3], [4, 5, 6]), row([1, 2, 3], [7, 8, 9])])
    layout = layout_of(batch)
    tokens = batch.input_ids.flatten()
    assert sorted(tokens[layout.places].tolist()) == [2, 3, 4, 5, 7, 8]
    of_query = tokens[layout.places[layout.queries]].tolist()
    before = [of_query[one] if one >= 0 else None for one in layout.before.tolist()]
    assert dict(zip(of_query, before, strict=True)) == {3: None, 4: 3, 5: 4, 7: 3, 8: 7}


def test_a_gap_in_the_loss_mask_ends_a_draft() -> None:
    batch = collate([row([1, 2], [3, 4, 5, 6], mask=[1, 1, 0, 1])])
    layout = layout_of(batch)
    of_query = batch.input_ids.flatten()[layout.places[layout.queries]].tolist()
    assert of_query == [2, 3, 5]  # 4 predicts the masked 5
    assert layout.before.tolist() == [-1, 0, -1]


def test_rows_without_a_draft_have_no_layout() -> None:
    assert draft_layout(collate([])) is None
    assert draft_layout(collate([row([1], [2])])) is None  # nothing is before the only input


def paths(batch: CollatedBatch) -> list[np.ndarray[Any, Any]]:
    """Return the places of each sequence."""
    if batch.packing is None:
        num, length = batch.input_ids.shape
        return list(np.arange(num * length).reshape(num, length))
    tree = batch.packing.tree
    ends = tree.row_starts + tree.lengths
    return [tree.places[a:b] for a, b in zip(tree.row_starts, ends, strict=True)]


def chains(layout: DraftLayout) -> Iterator[tuple[int, int]]:
    """Yield each query with each step in which it drafts."""
    before = layout.before.tolist()
    for query in range(len(before)):
        step, at = 0, query
        while at >= 0:
            yield query, step
            step, at = step + 1, before[at]


ROWS = {
    "different lengths": make_rows(6),
    "shared prefixes": [
        row([1, 2, 3, 4], [5, 6, 7, 8]),
        row([1, 2, 3, 4], [5, 6, 9]),
        row([1, 2, 3, 4], [3, 3, 3, 3, 3], mask=[1, 0, 1, 1, 1]),
    ],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("limits", [(1 << 16, 1 << 21), (6, 8)])
def test_drafts_are_those_of_an_engine_with_a_cache(
    model: Path,
    rows: list[TrainRow],
    packed: bool,
    limits: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, limit in zip(("MAX_KEYS", "MAX_SCORES"), limits, strict=True):
        monkeypatch.setattr(layout_module, name, limit)
    head = HeadWeights.new(AutoConfig.from_pretrained(model))
    sizes, device = head.sizes, torch.device("cpu")
    batch = collate(rows, packed=packed)
    layout = layout_of(batch)
    random = torch.Generator().manual_seed(1)
    table = torch.randn(VOCABULARY, sizes.width, generator=random)
    hidden = torch.randn(batch.input_ids.numel(), len(sizes.layers) * sizes.width, generator=random)
    tokens = batch.input_ids.flatten()
    found = DraftNetwork(sizes, head.tensors, device).drafts(
        layout, table[tokens[layout.places]], hidden[layout.parents], num_steps=3
    )
    if limits[0] < 100:
        assert len(layout.pieces) > 1
    reference = ReferenceHead(head.tensors, head_dim=sizes.head_dim)
    num_checked = 0
    for query, step in chains(layout):
        if step >= len(found):
            continue
        place = int(layout.places[layout.queries[query]])
        path = next(one for one in paths(batch) if place in one)
        column = path.tolist().index(place)
        expected = reference.outputs(
            list(table[tokens[path[1:]]]), list(hidden[path[: column - step]]), step + 1
        )[step]
        torch.testing.assert_close(found[step][query], expected, atol=2e-5, rtol=1e-4)
        num_checked += 1
    assert num_checked > len(layout.queries)


def trained(engine: FSDPEngine, steps: int = 2) -> tuple[Any, list[StepResult], Any]:
    """Return gradients of the first step, all results, and the policy's state at the end."""
    results = []
    first = None
    for step in range(steps):
        rows = make_rows(10, seed=step)
        accumulate(engine, [rows[:6], rows[6:]])
        first = first or gradients(engine)
        results.append(engine.optimizer_step())
    state = {n: t for n, t in whole_state(engine).items() if "draft." not in n}
    return first, results, state | {"rng": torch.get_rng_state()}


def without_draft(result: StepResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if "draft/" not in name}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": "selective"},
        pytest.param({"gradient_checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"lora": "r2a4"}, marks=pytest.mark.slow),
    ],
)
def test_the_policy_is_the_same_to_the_last_bit(model: Path, settings: dict[str, Any]) -> None:
    plain = trained(make_engine(model, **settings))
    along = trained(make_engine(model, **settings, speculation=options()))
    for name, gradient in plain[0].items():
        assert torch.equal(gradient, along[0][name]), name
    for before, after in zip(plain[1], along[1], strict=True):
        assert before.metrics == without_draft(after)
        assert metrics.DRAFT_LOSS in after.metrics
    assert plain[2].keys() == along[2].keys()
    for name, tensor in plain[2].items():
        assert torch.equal(tensor, along[2][name]), name


def kl(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.log_softmax(-1), other.log_softmax(-1)
    return float((one.exp() * (one - other)).sum())


@pytest.mark.parametrize("chunk_tokens", [1 << 20, 8], ids=["one chunk", "chunks"])
@torch.no_grad()
def test_the_loss_is_the_divergence_of_the_policy_from_the_drafts(
    model: Path, chunk_tokens: int
) -> None:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    head = HeadWeights.new(policy.config)
    rows = [row([3, 4, 5], [6, 7, 8, 9, 3]), row([9, 3], [4, 4, 5])]
    num_steps = 2
    reference = ReferenceHead(head.tensors, head_dim=head.sizes.head_dim)
    losses, shares, agreeing = [], [], []
    for one in rows:
        tokens = torch.tensor([*one.prompt_token_ids, *one.token_ids])[:-1]
        found = policy(tokens[None], output_hidden_states=True)
        states = torch.cat([found.hidden_states[n][0] for n in head.sizes.layers], -1)
        table = policy.get_input_embeddings().weight
        first = len(one.prompt_token_ids) - 1
        for column in range(first, len(tokens)):  # the token that the draft reads
            for step in range(min(num_steps, column - first + 1)):
                outputs = reference.outputs(
                    list(table[tokens[1:]]), list(states[: column - step]), step + 1
                )
                drafted = policy.get_output_embeddings().weight @ outputs[step]
                losses.append(STEP_WEIGHT**step * kl(found.logits[0, column], drafted))
                shares.append(STEP_WEIGHT**step)
                if not step:
                    agreeing.append(bool(drafted.argmax() == found.logits[0, column].argmax()))
    engine = make_engine(model, speculation=options(num_tokens=num_steps))
    engine.role.network.chunk_tokens = chunk_tokens
    with torch.enable_grad():
        accumulate(engine, [rows])
    result = engine.optimizer_step()
    assert result.metrics[metrics.DRAFT_LOSS] == pytest.approx(sum(losses) / sum(shares), rel=1e-4)
    assert result.metrics[metrics.DRAFT_AGREEMENT] == pytest.approx(np.mean(agreeing))


def test_a_head_learns_a_fixed_policy(model: Path) -> None:
    engine = make_engine(
        model, learning_rate=1e-9, speculation=options(num_tokens=2, learning_rate=3e-3)
    )
    found = []
    for step in range(60):
        found.append(train_step(engine, make_rows(12, seed=step % 3)).metrics)
    losses = [one[metrics.DRAFT_LOSS] for one in found]
    agreement = [one[metrics.DRAFT_AGREEMENT] for one in found]
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3])
    assert np.mean(agreement[-3:]) > np.mean(agreement[:3]) + 0.3


def drafted_state(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: one for name, one in whole_state(engine).items() if "draft." in name}


def test_a_checkpoint_has_head_and_optimizer(model: Path, tmp_path: Path) -> None:
    engine = make_engine(model, speculation=options())
    trained(engine)
    state = drafted_state(engine)
    save(engine, tmp_path / "state")
    resumed = make_engine(model, speculation=options())
    resumed.load(tmp_path / "state")
    assert state.keys() == drafted_state(resumed).keys()
    assert {name.split(".")[2] for name in state} >= {"step", "exp_avg", "exp_avg_sq", "fc"}
    for name, tensor in drafted_state(resumed).items():
        assert torch.equal(tensor, state[name]), name
    rows = make_rows(8, seed=9)
    results = []
    for one in (engine, resumed):
        results.append(train_step(one, rows).metrics)
    assert results[0] == results[1]


def test_a_resumed_run_may_begin_or_end_to_train_a_head(model: Path, tmp_path: Path) -> None:
    with_head, without = make_engine(model, speculation=options()), make_engine(model)
    new = drafted_state(with_head)
    trained(with_head)
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    save(with_head, tmp_path / "with" / "state")
    save(without, tmp_path / "without" / "state")
    without.load(tmp_path / "with" / "state")
    for name, tensor in weights(without).items():
        assert torch.equal(tensor, weights(with_head)[name])
    with_head = make_engine(model, speculation=options())
    with_head.load(tmp_path / "without" / "state")
    for name, tensor in drafted_state(with_head).items():
        assert torch.equal(tensor, new[name]), name


def test_a_version_has_policy_and_head_together(model: Path) -> None:
    engine = make_engine(model, speculation=options())
    manifest = engine.publish()
    assert manifest is not None
    before = read_all(manifest)
    config = AutoConfig.from_pretrained(model)
    expected = published_head("", config)
    assert {n: tuple(t.shape) for n, t in before.items() if n.startswith(PUBLISHED)} == {
        name: tuple(one.shape) for name, one in expected.items()
    }
    trained(engine)
    newer = engine.publish()
    assert newer is not None
    after = read_all(newer)
    state = drafted_state(engine)
    for name in expected:
        assert torch.equal(after[name], state[f"buffer.draft.{name.removeprefix(PUBLISHED)}"])
        assert not torch.equal(after[name], before[name])
    assert set(after) == set(before)
    engine.close()


def test_an_exported_model_has_the_head_in_a_folder(model: Path, tmp_path: Path) -> None:
    engine = make_engine(model, speculation=options())
    trained(engine)
    engine.export(tmp_path / "hf")
    head = HeadWeights.read(str(tmp_path / "hf" / SAVED_AS), AutoConfig.from_pretrained(model))
    state = drafted_state(engine)
    for name, tensor in head.tensors.items():
        assert torch.equal(tensor, state[f"buffer.draft.{name}"])


def own_output(model: Path, directory: Path) -> Path:
    """Write a head that drafts every second token by an output layer of its own."""
    config = AutoConfig.from_pretrained(model)
    num = VOCABULARY // 2
    settings = new_config(config) | {"draft_vocab_size": num}
    sizes = HeadSizes.of(settings, config)
    tensors = HeadWeights.new(config).tensors
    tensors[OUTPUT] = torch.randn(num, sizes.width, generator=torch.Generator().manual_seed(2))
    tensors[TOKENS] = torch.arange(num)  # token 2 n minus n
    HeadWeights(sizes, tensors).save(directory, torch.float32)
    return directory


def test_a_given_head_may_draft_a_part_of_the_vocabulary(model: Path, tmp_path: Path) -> None:
    given = own_output(model, tmp_path / "head")
    mask = lazy_tensors(given)[MASK].read()
    assert mask.tolist() == [token % 2 == 0 and token < 20 for token in range(VOCABULARY)]
    engine = make_engine(
        model, learning_rate=1e-9, speculation=options(model=str(given), learning_rate=3e-3)
    )
    found: list[Mapping[str, float]] = []
    for _ in range(12):
        found.append(train_step(engine, make_rows(12)).metrics)
    assert found[-1][metrics.DRAFT_LOSS] < found[0][metrics.DRAFT_LOSS]
    manifest = engine.publish()
    assert manifest is not None
    published = read_all(manifest)
    assert published[PUBLISHED + TOKENS].tolist() == list(range(VOCABULARY // 2))
    assert published[PUBLISHED + OUTPUT].shape == (VOCABULARY // 2, 32)
    engine.export(tmp_path / "hf")
    written = lazy_tensors(tmp_path / "hf" / SAVED_AS)
    assert {TOKENS, MASK, OUTPUT} <= written.keys()
    engine.close()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"hidden_size": 16}, "hidden_size"),
        ({"vocab_size": VOCABULARY + 1}, "vocab_size"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "architectures"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9]}, None),
    ],
)
def test_heads_that_cannot_be_trained(
    model: Path, changed: dict[str, Any], field: str | None
) -> None:
    config = AutoConfig.from_pretrained(model)
    name = "rollout.speculation.model"
    with invalid(f"{name}: {field}" if field else name):
        HeadSizes.of(new_config(config) | changed, config)


def test_files_with_other_weights_are_refused(model: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model)
    head = HeadWeights.new(config)
    embedding = {"embed_tokens.weight": torch.zeros(VOCABULARY, 32)}
    for number, tensors in enumerate(
        [head.tensors | embedding, {"fc.weight": head.tensors["fc.weight"]}]
    ):
        HeadWeights(head.sizes, tensors).save(tmp_path / str(number), torch.float32)
        with invalid("rollout.speculation.model"):
            HeadWeights.read(str(tmp_path / str(number)), config)
    with invalid("rollout.speculation.model"):
        HeadWeights.read(str(tmp_path / "nothing"), config)


def on_rank(rank: int, num_ranks: int, model: str) -> tuple[list[StepResult], Any]:
    torch.manual_seed(0)
    engine = make_engine(Path(model), rank=rank, world_size=num_ranks, speculation=options())
    results = []
    for step in range(2):
        rows = make_rows(9, seed=step)
        share = rows if num_ranks == 1 else (rows[:7] if rank == 0 else rows[7:])
        results.append(train_step(engine, share))
    state = drafted_state(engine)
    engine.close()
    return results, state


@pytest.mark.slow
def test_two_ranks_train_the_head_of_one(model: Path) -> None:
    (alone,) = [on_rank(0, 1, str(model))]
    first, second = on_ranks(2, on_rank, str(model))
    for name, tensor in first[1].items():
        assert torch.equal(tensor, second[1][name]), name
        torch.testing.assert_close(tensor, alone[1][name], atol=2e-4, rtol=1e-3)
    for one, expected in zip(first[0], alone[0], strict=True):
        for name in (metrics.DRAFT_LOSS, metrics.DRAFT_AGREEMENT):
            assert one.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4)
