"""Find the smallest change with which a run fits onto its machines.

Candidates keep the results of the run (except for rounding) and are ordered by cost. Each candidate
is estimated again before it is proposed.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rlsys.common.option_names import option
from rlsys.config import RunConfig, TrainedRoleConfig
from rlsys.config.machine import CARDS, Machine, parse_machines
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.engines.models.model_shape import ModelShape
from rlsys.launcher.machine_fit import ProcessLayout
from rlsys.launcher.memory_estimate import ceil_to
from rlsys.launcher.rank_estimate import estimate_rank

from .demands import first_needs

# Fraction of a GPU that a proposal for rollout.gpu_memory_frac leaves free.
SPARE = 0.02

# Smallest KV cache that is proposed, in GiB.
MIN_CACHE_GIB = 0.05


def advice(
    config: RunConfig,
    flow: StageGraph,
    shape: ModelShape,
    machines: Sequence[Machine],
    layout: ProcessLayout,
    fits: Callable[[RunConfig, Sequence[Machine]], bool],
) -> str:
    """Return a sentence with the smallest change, or with the GPUs on which the run fits.

    `fits` returns whether a changed configuration has no shortage on the machines. The result is ""
    if there is neither and only CPUs are short.
    """

    def fits_here(changed: RunConfig) -> bool:
        return fits(changed, machines)

    num_devices = sum(len(machine.devices) for machine in machines)
    candidates = () if layout.unplaced else _changes(config, flow, shape, layout, fits_here)
    for text, changed in candidates:
        needs_more = sum(need.num_gpus for need in first_needs(changed, flow)) > num_devices
        if not needs_more and fits_here(changed):
            return f"The smallest change that fits: {text}."
    if not layout.shortages:
        return ""
    found = _card_that_fits(config, flow, machines, fits)
    if layout.unplaced:
        alternative = f" It fits on {found}." if found else ""
        fix = "Set num_gpus=0 to run on CPUs, use fewer ranks or replicas, or add GPUs."
        return f"{fix}{alternative}"
    if found:
        return f"No change of the memory settings suffices. The run fits on {found}."
    return "No change of the memory settings suffices. Use a smaller model or more ranks."


def _changes(
    config: RunConfig,
    flow: StageGraph,
    shape: ModelShape,
    layout: ProcessLayout,
    fits: Callable[[RunConfig], bool],
) -> Iterator[tuple[str, RunConfig]]:
    yield from _fewer_cpus(config)
    yield from _smaller_caches(config, layout)
    yield from _smaller_micro_batches(config, flow, shape, layout)
    recomputed = _with(config, "model", gradient_checkpointing="full")
    recompute = option("model.gradient_checkpointing", "full")
    yield recompute, recomputed
    offload, offloaded = "", recomputed
    if config.trainer.num_gpus and not config.trainer.offloads_moments:
        state = f"cpu_{config.trainer.optimizer_state}"
        offload = f" {option('trainer.optimizer_state', state)}"
        yield offload.strip(), _with(config, "trainer", optimizer_state=state)
        offloaded = _with(recomputed, "trainer", optimizer_state=state)
    layouts = [*_wider(config)]
    yield from ((option("trainer.layout", one.trainer.layout), one) for one in layouts)
    for times in (1, 2, 4, 8):
        tokens = config.trainer.micro_batch_tokens // times
        if tokens >= _longest(config):
            fewer = _with(offloaded, "trainer", micro_batch_tokens=tokens)
            text = f"{recompute}{offload}"
            smaller = option("trainer.micro_batch_tokens", tokens)
            yield f"{text} {smaller}" if times > 1 else text, fewer
    for one in layouts:
        wider = _with(offloaded, "trainer", layout=one.trainer.layout)
        yield f"{recompute}{offload} {option('trainer.layout', one.trainer.layout)}", wider
    yield from _fewer_replicas(config, fits)


def _fewer_cpus(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield one CPU for each process that reserves several."""
    sections = [one for one in ("rollout", "trainer") if getattr(config, one).num_cpus > 1]
    texts: list[str] = []
    changed = config
    for section in sections:
        text = option(f"{section}.num_cpus", 1)
        yield text, _with(config, section, num_cpus=1)
        texts, changed = [*texts, text], _with(changed, section, num_cpus=1)
    if len(sections) > 1:
        yield " ".join(texts), changed


def _fewer_replicas(
    config: RunConfig, fits: Callable[[RunConfig], bool]
) -> Iterator[tuple[str, RunConfig]]:
    """Yield the largest number of replicas that fits, if there is one."""
    name = "num_replicas" if config.rollout.min_replicas is None else "min_replicas"
    counts = range(1, config.rollout.num_first)
    number = bisect.bisect_left(
        counts, True, key=lambda count: not fits(_with(config, "rollout", **{name: count}))
    )
    if number:
        count = counts[number - 1]
        yield option(f"rollout.{name}", count), _with(config, "rollout", **{name: count})


def _smaller_caches(config: RunConfig, layout: ProcessLayout) -> Iterator[tuple[str, RunConfig]]:
    if config.rollout.num_gpus and config.rollout.engine == "vllm":
        for node in layout.nodes:
            for device in node.devices:
                shares = [one for one in device.demands if one.device_frac]
                others = device.used_bytes - sum(one.on_device(device.num_bytes) for one in shares)
                if shares and device.used_bytes > device.num_bytes:
                    left = (1 - others / device.num_bytes) / len(shares) - SPARE
                    if (frac := int(100 * left) / 100) > 0:
                        text = option("rollout.gpu_memory_frac", frac)
                        yield text, _with(config, "rollout", gpu_memory_frac=frac)
        return
    gib = config.rollout.kv_cache_gib / 2
    while gib >= MIN_CACHE_GIB:
        rounded = ceil_to(gib, 3)
        yield (
            option("rollout.kv_cache_gib", rounded),
            _with(config, "rollout", kv_cache_gib=rounded),
        )
        gib /= 2


def _smaller_micro_batches(
    config: RunConfig, flow: StageGraph, shape: ModelShape, layout: ProcessLayout
) -> Iterator[tuple[str, RunConfig]]:
    """Yield smaller micro-batches, starting with the largest that may suffice.

    The memory of a micro-batch is about proportional to its tokens.
    """
    own = TrainedRoleConfig(model=config.model, trainer=config.trainer)
    passes = estimate_rank(config, own, shape, flow.main.head).passes
    missing = max(
        (one.used_bytes - one.num_bytes for node in layout.nodes for one in node.devices),
        default=0,
    )
    times = 2
    while (tokens := config.trainer.micro_batch_tokens // times) >= _longest(config):
        if passes * (1 - 1 / times) >= 0.8 * missing:
            fewer = _with(config, "trainer", micro_batch_tokens=tokens)
            yield option("trainer.micro_batch_tokens", tokens), fewer
        times *= 2


def _longest(config: RunConfig) -> int:
    return config.data.max_prompt_tokens + config.sampling.max_tokens


def _wider(config: RunConfig) -> Iterator[RunConfig]:
    """Yield data-parallel layouts with two, four and eight times the ranks."""
    layout = config.trainer.parallel
    if len(config.trainer.layouts) > 1 or layout.num_ranks != layout.dp_shard:
        return
    for times in (2, 4, 8):
        try:
            yield _with(config, "trainer", layout=f"dp{times * layout.dp_shard}")
        except ValueError:  # the ranks do not divide prompts_per_step
            return


def _with(config: RunConfig, section: str, **changes: object) -> RunConfig:
    changed: dict[str, object] = {section: replace(getattr(config, section), **changes)}
    return replace(config, **changed)  # type: ignore[arg-type]


def _card_that_fits(
    config: RunConfig,
    flow: StageGraph,
    machines: Sequence[Machine],
    fits: Callable[[RunConfig, Sequence[Machine]], bool],
) -> str:
    """Return the machines on which the run fits unchanged, as --dry-run names them, or "".

    More of the present cards come first, then all cards from the smallest.
    """
    alone = first_needs(config, flow)
    shares = sum(need.num_gpus for need in alone if need.num_gpus % 1)
    whole = sum(need.num_gpus for need in alone if not need.num_gpus % 1)
    if not (count := int(whole) + math.ceil(shares)):
        return ""
    present = [device.option for machine in machines for device in machine.devices]
    for card in filter(None, dict.fromkeys([*present, *CARDS])):
        if fits(config, parse_machines(named := f"{count}x{card}")):
            return named
    return ""
