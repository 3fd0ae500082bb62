"""Check that weights and trainer states arrive bit by bit in every layout and engine.

    python scripts/check_reallocation.py [--families qwen3 ...] [--layouts dp1 ...]
                                         [--engines torch "vllm tp1" ...] [--start-anew]
                                         [--links]
    python scripts/check_reallocation.py --trainers [--families qwen3 ...] [--layouts dp1 ...]

Real ranks (processes connected over gloo) train small random models for a step on different rows in
each layout, export a checkpoint and stage their shards. Each engine loads one layout after the
other and completes the same prompts, greedily and sampled. In float32, tokens and log-probabilities
must equal those of a torch engine that starts from the checkpoint, to the last bit. vLLM takes long
to start, so only one is started from the checkpoint of the last layout; it loads the others as one
process stages them whole. With `--start-anew`, a new one starts each time. With `--links`, the
weights arrive over process groups, as on another node, instead of in shared memory.

With --trainers, ranks of each layout train a step and leave snapshots and a checkpoint, alternating
between two nodes. Ranks of every other layout read the state from the snapshots, like a trainer
that has lost a node. It must equal the state that they then load from the checkpoint, to the last
bit: parameters, moments, buffers and the random state.

Prints a line for each cell of the table and JSON last: the numbers of `equal`, `refused`, `wrong`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.config import ModelConfig, RolloutConfig, TrainerConfig
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.data.hub import in_short
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.models.causal_lm import hide_progress_bars, load_causal_lm
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.state_resharding import Kept, find_move, packed
from rlsys.engines.training.trainer_state import finish_state
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.reallocation.shards import Holder, local_part
from rlsys.reallocation.transport.weight_views import Weights, stage_whole
from rlsys.types import (
    Generation,
    GenerationRequest,
    MicroBatch,
    SamplingParams,
    TrainRow,
    WeightManifest,
)
from scripts.linked_weights import OfferedWeights, offered, received
from scripts.ranks import on_ranks, staying_ranks

LAYOUTS = ("dp1", "dp2", "tp2", "dp2tp2", "pp2", "dp2pp2", "ep2")
# Number of vLLM's ranks in each engine.
ENGINES: dict[str, int] = {"torch": 0, "vllm tp1": 1, "vllm tp2": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "gemma3": {
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}
# vLLM pads a vocabulary of 48 to 64, and none of its kernels has smaller heads.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
CHARACTERS = "0123456789+-*/=. #abcdefghijklmnopqrstuvwxyz,;"
PROMPTS = ([5, 9, 40], list(range(3, 47)) * 2, [17])
TIMEOUT_S = 600.0

# Layouts of trainers between which states move.
TRAINERS = ("dp1", "dp2", "dp2x1", "tp2", "pp2", "dp2tp2", "ep2")
KNOWN = tuple(dict.fromkeys((*LAYOUTS, *TRAINERS)))
NODES = "AB"  # nodes of the ranks, alternating

# Weights by layout, or the reason why a trainer refuses the layout.
Trained = dict[str, WeightManifest | OfferedWeights | str]


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """Result of one layout's weights in one engine, or of its state in another layout."""

    family: str
    layout: str
    to: str
    result: str  # equal, refused, wrong
    remark: str = ""

    def __str__(self) -> str:
        text = f"{self.family:10} {self.layout:7} -> {self.to:9} {self.result}"
        return f"{text}: {self.remark}" if self.remark else text


def build_model(directory: Path, family: str) -> Path:
    """Write a model with random weights in float32, norms included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = build_tokenizer(CHARACTERS)
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id")}
    changes = dict(FAMILIES[family])
    config = AutoConfig.for_model(
        changes.pop("model_type"), vocab_size=len(tokenizer), **SIZES, **special, **changes
    )
    config.eos_token_id = None  # every completion has the maximum length
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.1 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_rows(seed: int) -> list[TrainRow]:
    """Return eight rows of 3 to 24 tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(8):
        tokens = rng.integers(3, 3 + len(CHARACTERS), int(rng.integers(3, 25))).astype(np.int32)
        length = len(tokens) - 1
        columns = {
            "sampler_logprobs": np.full(length, -3.0, np.float32),
            "advantages": np.full(length, rng.normal(), np.float32),
        }
        rows.append(
            TrainRow(
                prompt_token_ids=tokens[:1],
                token_ids=tokens[1:],
                policy_versions=np.zeros(length, np.int32),
                loss_mask=np.ones(length, np.bool_),
                columns=columns,
                group_id=number,
                group_size=1,
                group_num_tokens=length,
            )
        )
    return rows


@contextlib.contextmanager
def trained(
    rank: int,
    world_size: int,
    directory: Path,
    families: Sequence[str],
    layouts: Sequence[str],
    over_links: bool,
) -> Iterator[dict[str, Trained]]:
    """Yield the weights of layouts by family on rank 0, each after its own training step.

    With `over_links`, the ranks send them. The layouts have the same number of ranks. Weights
    remain while the context does. Each layout is also exported to FAMILY-LAYOUT.
    """
    found: dict[str, Trained] = {family: {} for family in families}
    with ExitStack() as opened:
        for family in families:
            for layout in layouts:
                try:
                    engine = make_trainer(directory / family, layout, rank)
                except ValueError as refusal:
                    found[family][layout] = in_short(refusal)
                    continue
                opened.enter_context(closing(engine))
                manifest = published(engine, ParallelLayout.parse(layout), KNOWN.index(layout) + 1)
                engine.export(directory / f"{family}-{layout}")
                if over_links:
                    found[family][layout] = offered(engine, manifest, opened)
                elif manifest is not None:
                    found[family][layout] = manifest
        yield found


def kept(of_layouts: Trained, opened: ExitStack) -> Trained:
    """Open the weights in this process, so that they outlive their ranks."""
    found: Trained = {}
    for layout, manifest in of_layouts.items():
        if isinstance(manifest, WeightManifest):
            manifest = opened.enter_context(Weights(manifest)).local
        elif isinstance(manifest, OfferedWeights):
            manifest = received(manifest, opened)
        found[layout] = manifest
    return found


def make_trainer(path: Path, layout: str, rank: int) -> FSDPEngine:
    """Return a trainer's engine."""
    return FSDPEngine(
        model_path=path,
        trainer=TrainerConfig(learning_rate=1e-2, layout=layout),
        model=ModelConfig(),
        loss=clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
        temperature=1.0,
        num_total_steps=10,
        seed=0,
        rank=rank,
        world_size=ParallelLayout.parse(layout).num_ranks,
    )


def published(engine: FSDPEngine, layout: ParallelLayout, version: int) -> WeightManifest | None:
    """Return the weights after a step on rows that no other version has used."""
    share = make_rows(version)[layout.data_index(engine.ranks.rank) :: layout.num_data]
    engine.accumulate(MicroBatch(rows=share))
    engine.optimizer_step()
    engine.policy_version = version
    return engine.publish()


def requests(name: str) -> list[GenerationRequest]:
    """Return greedy and sampled requests."""
    return [
        GenerationRequest(
            request_id=f"{name} {top_k} {number}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=24, top_k=top_k),
            seed=number,
        )
        for top_k in (1, SamplingParams().top_k)
        for number, prompt in enumerate(PROMPTS)
    ]


@asynccontextmanager
async def running(path: Path, num_ranks: int) -> AsyncIterator[GenerationEngine]:
    """Yield a vLLM engine of so many ranks; for 0 ranks, the torch engine."""
    options: dict[str, Any] = {"max_running": 16, "kv_cache_gib": 0.0625}
    options["num_cpus"] = max(1, num_ranks)
    if num_ranks:
        config = RolloutConfig(engine="vllm", tensor_parallel=num_ranks, **options)
        engine: GenerationEngine = VLLMEngine(str(path), config, dtype="float32")
    else:
        engine = TorchEngine(path, RolloutConfig(**options), dtype="float32", stop_token_ids=())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def completed(engine: GenerationEngine, name: str) -> list[Generation]:
    """Complete all requests as one batch, submitted while the engine is paused."""
    asked = requests(name)
    await engine.pause()
    engine.submit(asked)
    await engine.resume()
    ended: dict[str, Generation] = {}
    async with asyncio.timeout(TIMEOUT_S):
        while len(ended) < len(asked):
            ended |= {one.request_id: one for one in await engine.collect()}
    return [ended[one.request_id] for one in asked]


async def taken(engine: GenerationEngine, manifest: WeightManifest) -> list[Generation]:
    """Return the completions with other weights."""
    await engine.prepare(manifest)
    await engine.pause()
    await engine.load()
    await engine.resume()
    return await completed(engine, f"version {manifest.version}")


def staged(path: Path, version: int, opened: ExitStack) -> WeightManifest:
    """Stage a checkpoint whole, in one process."""
    tensors = model_tensors(load_causal_lm(path, dtype="float32"))
    stage, manifest = stage_whole(version, {name: one.detach() for name, one in tensors.items()})
    opened.callback(stage.close)
    return manifest


async def expected_of(
    paths: Mapping[str, Path], num_ranks: int, *, start_anew: bool
) -> dict[str, list[Generation]]:
    """Return by layout the completions of engines that start from its checkpoint.

    A running vLLM loads the checkpoint as a whole instead, unless `start_anew`.
    """
    found: dict[str, list[Generation]] = {}
    first, *others = reversed(list(paths))
    with ExitStack() as opened:
        async with running(paths[first], num_ranks) as engine:
            found[first] = await completed(engine, first)
            if num_ranks and not start_anew:
                for number, layout in enumerate(others, start=1):
                    found[layout] = await taken(engine, staged(paths[layout], number, opened))
    for layout in others:
        if layout not in found:
            async with running(paths[layout], num_ranks) as engine:
                found[layout] = await completed(engine, layout)
    return found


async def compared(
    directory: Path, family: str, of_layouts: Trained, engine_name: str, *, start_anew: bool
) -> list[CellResult]:
    """Return the results of all layouts in one engine."""

    def cell(layout: str, result: str, remark: str = "") -> CellResult:
        return CellResult(
            family=family, layout=layout, to=engine_name, result=result, remark=remark
        )

    manifests = {one: m for one, m in of_layouts.items() if isinstance(m, WeightManifest)}
    cells = [cell(one, "refused", m) for one, m in of_layouts.items() if isinstance(m, str)]
    num_ranks = ENGINES[engine_name]
    paths = {layout: directory / f"{family}-{layout}" for layout in manifests}
    found: dict[str, list[Generation]] = {}
    try:
        async with running(directory / family, num_ranks) as engine:
            before = await completed(engine, "before")
            for layout, manifest in manifests.items():
                found[layout] = await taken(engine, manifest)
        expected = await expected_of(paths, num_ranks, start_anew=start_anew)
    except ValueError as refusal:
        return cells + [cell(layout, "refused", in_short(refusal)) for layout in manifests]
    for layout, manifest in manifests.items():
        wrong = difference(found[layout], expected[layout], manifest.version)
        if not wrong and not difference(found[layout], before, manifest.version):
            wrong = "the previous weights are still loaded"
        cells.append(cell(layout, "wrong" if wrong else "equal", wrong))
        before = found[layout]
    return cells


def difference(found: Sequence[Generation], expected: Sequence[Generation], version: int) -> str:
    """Return the difference in words, empty for none."""
    apart = 0.0
    for one, other in zip(found, expected, strict=True):
        if not (one.policy_versions == version).all():
            return f"{one.request_id!r} has tokens of versions {set(one.policy_versions.tolist())}"
        if not np.array_equal(one.token_ids, other.token_ids):
            return f"{one.request_id!r} has other tokens"
        apart = max(apart, float(np.abs(one.sampler_logprobs - other.sampler_logprobs).max()))
    return f"log-probabilities differ by up to {apart}" if apart else ""


def check(
    directory: Path,
    *,
    families: Sequence[str] = tuple(FAMILIES),
    layouts: Sequence[str] = LAYOUTS,
    engines: Sequence[str] = tuple(ENGINES),
    start_anew: bool = False,
    over_links: bool = False,
    on_cell: Callable[[CellResult], None] = lambda cell: None,
) -> list[CellResult]:
    """Return the table, or a part of it."""
    for family in families:
        build_model(directory / family, family)
    cells = []
    with ExitStack() as opened:
        of_families: dict[str, Trained] = {family: {} for family in families}
        for num_ranks in sorted({ParallelLayout.parse(one).num_ranks for one in layouts}):
            of_size = [one for one in layouts if ParallelLayout.parse(one).num_ranks == num_ranks]
            given = directory, families, of_size, over_links
            with staying_ranks(num_ranks, trained, *given) as (first, *_):
                for family, of_layouts in first.items():
                    of_families[family] |= kept(of_layouts, opened)
        for family, of_layouts in of_families.items():
            for engine in engines:
                coming = compared(directory, family, of_layouts, engine, start_anew=start_anew)
                for cell in sorted(asyncio.run(coming), key=lambda one: layouts.index(one.layout)):
                    on_cell(cell)
                    cells.append(cell)
    return cells


def left_behind(
    rank: int, world_size: int, directory: Path, families: Sequence[str], layouts: Sequence[str]
) -> dict[tuple[str, str], Kept | str]:
    """By family and layout, this rank's file after a step; or why there is none."""
    found: dict[tuple[str, str], Kept | str] = {}
    for family, layout in itertools.product(families, layouts):
        try:
            engine = make_trainer(directory / family, layout, rank)
        except ValueError as refusal:
            found[family, layout] = in_short(refusal)
            continue
        published(engine, ParallelLayout.parse(layout), version=1)
        name = f"{family}-{layout}-{rank}"
        path = directory / name
        path.write_bytes(bytes(engine.snapshot_bytes(1)))
        held = engine.hold(engine.open_snapshots(str(path), name))
        checkpoint = directory / f"{family}-{layout}-checkpoint"
        parts = engine.ranks.all(held.write(checkpoint))
        if rank == 0:
            finish_state(checkpoint, parts)
        holder = Holder(name, NODES[rank % len(NODES)], engine.state_holdings)
        found[family, layout] = Kept(path=str(path), name=name, holder=holder)
        engine.close()
    return found


def arrived(
    rank: int,
    world_size: int,
    directory: Path,
    moves: Sequence[tuple[str, str, str, Sequence[Kept]]],
) -> list[str]:
    """Return for each move what is wrong on this rank, empty for nothing.

    A move has a family, a layout, another layout with this number of ranks, and files of the first
    one.
    """
    found = []
    for family, layout, onto, files in moves:
        try:
            engine = make_trainer(directory / family, onto, rank)
        except ValueError as refusal:
            found.append(in_short(refusal))
            continue
        node = NODES[rank % len(NODES)]
        targets = engine.ranks.all(Holder(f"rank {rank}", node, engine.state_holdings))
        move = find_move([(file, {1}) for file in files], targets, at_most=1)
        assert move is not None, "the files together are a whole state"
        weight_deltas = [packed(move, sender, node) for sender in move.senders.get(node, ())]
        engine.take(move, f"rank {rank}", weight_deltas)
        taken = state_of(engine)
        with torch.no_grad():
            for tensor in engine.local_state().values():
                local_part(tensor).zero_()
        torch.manual_seed(99)
        engine.load(directory / f"{family}-{layout}-checkpoint")
        loaded = state_of(engine)
        differ = [name for name, one in loaded.items() if not torch.equal(one, taken[name])]
        found.append(f"{len(differ)} tensors differ, {differ[:2]}" if differ else "")
        engine.close()
    return found


def state_of(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Return the state of this rank, with its version."""
    state = {name: local_part(one).clone() for name, one in engine.local_state().items()}
    return state | {"policy_version": torch.tensor(engine.policy_version)}


def check_trainers(
    directory: Path,
    *,
    families: Sequence[str] = tuple(FAMILIES),
    pairs: Sequence[tuple[str, str]],
    on_cell: Callable[[CellResult], None] = lambda cell: None,
) -> list[CellResult]:
    """Return the results of moving the state from the first to the second of each pair."""
    for family in families:
        build_model(directory / family, family)

    def by_size(layouts: Iterable[str]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for layout in dict.fromkeys(layouts):
            found.setdefault(ParallelLayout.parse(layout).num_ranks, []).append(layout)
        return found

    files: dict[tuple[str, str], list[Kept | str]] = {}
    for num_ranks, layouts in by_size(before for before, _ in pairs).items():
        of_ranks = on_ranks(num_ranks, left_behind, directory, families, layouts)
        files |= {key: [of_rank[key] for of_rank in of_ranks] for key in of_ranks[0]}
    cells = []

    def report(move: tuple[str, str, str], remark: str) -> None:
        family, before, after = move
        result = ("wrong" if "differ" in remark else "refused") if remark else "equal"
        cell = CellResult(family=family, layout=before, to=after, result=result, remark=remark)
        cells.append(cell)
        on_cell(cell)

    for num_ranks, layouts in by_size(after for _, after in pairs).items():
        moves = []
        for family, (before, after) in itertools.product(families, pairs):
            left = files[family, before]
            own = [one for one in left if isinstance(one, Kept)]
            if after in layouts and own:
                moves.append((family, before, after, own))
            elif after in layouts:
                report((family, before, after), str(left[0]))
        by_rank = on_ranks(num_ranks, arrived, directory, moves)
        for move, remarks in zip(moves, zip(*by_rank, strict=True), strict=True):
            report(move[:3], next(filter(None, remarks), ""))
    return cells


def main() -> None:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument(
        "--trainers", action="store_true", help="move states between layouts of trainers"
    )
    parser.add_argument("--layouts", nargs="+", choices=KNOWN)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument(
        "--start-anew", action="store_true", help="start an engine for each cell; 20 s each"
    )
    parser.add_argument("--links", action="store_true", help="send the weights over process groups")
    arguments = parser.parse_args()
    hide_progress_bars()
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        cells: Sequence[CellResult]
        if arguments.trainers:
            cells = check_trainers(
                Path(directory),
                families=arguments.families,
                pairs=list(itertools.permutations(arguments.layouts or TRAINERS, 2)),
                on_cell=lambda cell: print(cell, flush=True),
            )
        else:
            cells = check(
                Path(directory),
                families=arguments.families,
                layouts=arguments.layouts or LAYOUTS,
                engines=arguments.engines,
                start_anew=arguments.start_anew,
                over_links=arguments.links,
                on_cell=lambda cell: print(cell, flush=True),
            )
    counts = Counter(cell.result for cell in cells)
    results = {name: counts[name] for name in ("equal", "refused", "wrong")}
    print(json.dumps(results | {"seconds": round(time.perf_counter() - start)}))
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
