"""Report of the planner: a table of plans, and a picture of the best one.

The picture has one bar per group of devices: the time of a step above, memory below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from rlsys.planner.cpu_device import CpuProbe, cpu_core
from rlsys.planner.hardware import Cluster
from rlsys.planner.memory import MemoryNeed
from rlsys.planner.planning import RunPlanning, SimulatedPlan
from rlsys.planner.run_plan import steps_ahead
from rlsys.planner.search import TIE, as_layout
from rlsys.planner.stack_profile import Factor, StackProfile

GB = 1e9
HEADER = (
    "",
    "step",
    "80 % interval",
    "tokens/s/device",
    "placement",
    "trainer",
    "replicas",
    "staleness",
    "trainer GB",
    "busy: trainer, generation",
)

WIDTH, BAR, GAP, LEFT = 760, 22, 8, 150
COLORS = {
    "busy": "#2a6fb0",
    "idle": "#d7dde3",
    "memory": "#4f9a63",
    "free": "#d7dde3",
}


def lines(planning: RunPlanning, num_shown: int = 8) -> Iterator[str]:
    """Yield the report as lines of text."""
    shape = planning.shape
    work = shape.workload
    yield (
        f"{shape.policy.model.name} on {planning.cluster}: {work.prompts} prompts x "
        f"{work.group_size} rollouts per step, prompts of {work.prompt_tokens:.0f} tokens, "
        f"completions of {work.completions.mean:.0f} (at most {work.completions.maximum})"
    )
    for assumption in planning.assumptions:
        yield f"assumed: {assumption}"
    num_simulated = sum(one.result is not None for one in planning.plans)
    fitting = "1 plan fits" if planning.num_found == 1 else f"{planning.num_found} plans fit"
    yield f"{fitting}; simulated with the controller: {num_simulated}"
    yield ""
    rows = [row(number, one, planning) for number, one in enumerate(planning.plans[:num_shown], 1)]
    yield from aligned([HEADER, *rows])
    num_tied = sum(one.ranked.is_tied for one in planning.plans[:num_shown])
    if num_tied > 1:
        yield (
            f"= ties: the model cannot tell the first {num_tied} apart. The one with the lower "
            "staleness and fewer devices is first."
        )
    yield (
        "trainer: layout and recomputed activations; trainer GB: the largest rank, of its device; "
        "busy: share of the step in which devices have work. Plans that were not simulated (closed "
        "form) come last."
    )
    yield staleness_line(planning)


def staleness_line(planning: RunPlanning) -> str:
    """Return which staleness the first plan uses, and why a larger one does not help."""
    plan = planning.plans[0].ranked.plan
    used, largest = plan.max_staleness, max(planning.bounds)
    text = f"The first plan has asynchrony.max_staleness={used}"
    if used == largest:
        return f"{text}. --staleness tries other values."
    text += f". Values up to {largest} were tried: no plan with more is faster by over {TIE:.0%}"
    if plan.placement == "colocated" and planning.plans[0].result is None:
        text += ", since the closed form counts no gain on shared devices. --simulate plays it"
    elif steps_ahead(used, planning.shape.updates) >= 1:
        text += ", since one step ahead overlaps generation and training"
    return f"{text}."


def seconds_text(seconds: float) -> str:
    """Return seconds with three digits: 0.254, 2.54, 25.4, 254."""
    digits = 3 if seconds < 1 else 2 if seconds < 10 else 1 if seconds < 100 else 0
    return f"{seconds:.{digits}f}"


def row(number: int, one: SimulatedPlan, planning: RunPlanning) -> tuple[str, ...]:
    """Return the cells of a plan."""
    plan, estimate = one.ranked.plan, one.ranked.estimate
    work = planning.shape.workload
    tokens = work.rollouts * work.completions.mean / estimate.seconds / plan.num_gpus
    layouts = ", ".join(
        f"{as_layout(trainer)} {trainer.recompute}" for trainer in plan.trainers.values()
    )
    memory = max(need.total for name, need in one.ranked.memory.items() if name in plan.trainers)
    busy = "closed form"
    if one.result is not None:
        busy = f"{one.result.trainer_busy:.0%}, {one.result.generation_busy:.0%}"
    return (
        f"{number}{'=' if one.ranked.is_tied else ''}",
        f"{seconds_text(estimate.seconds)} s",
        f"{seconds_text(estimate.low)} to {seconds_text(estimate.high)} s",
        f"{tokens:,.0f}",
        plan.placement,
        layouts,
        f"{plan.replicas} x tp{plan.generation.tp}",
        str(plan.max_staleness),
        f"{memory / GB:.0f} of {planning.cluster.gpu.memory_bytes / GB:.0f}",
        busy,
    )


def profile_lines(profile: StackProfile) -> Iterator[str]:
    """Yield the factors of a calibrated profile."""
    yield f"Profile of {', '.join(profile.devices)} from {'; '.join(profile.runs)}:"
    rows = [("", "factor", "spread", "runs"), _factor_row("training", profile.training)]
    for engine, factors in profile.engines.items():
        rows.append(_factor_row(f"{engine}: kernels of generation", factors.decoding))
        rows.append(_factor_row(f"{engine}: engine on the host", factors.host))
    yield from aligned(rows)
    yield f"rest of a step per group: {profile.rest_s * 1e3:.2f} ms"
    yield f"one reward: {profile.reward_s * 1e3:.2f} ms"
    yield f"the controller's process per group: {profile.controller_s * 1e3:.2f} ms"
    yield f"CPU time of actors beyond their work, per group: {profile.other_s * 1e3:.2f} ms"
    yield f"spread of a predicted step: {profile.step_spread:.0%}"


def _factor_row(name: str, factor: Factor) -> tuple[str, ...]:
    return name, f"{factor.value:.3f}", f"{factor.spread:.0%}", str(factor.runs)


def probe_lines(probe: CpuProbe) -> Iterator[str]:
    """Yield the rates of a measured machine."""
    yield f"{probe.processor}, {probe.cores} cores, {probe.memory_gib:.0f} GiB; one core:"
    for dtype in probe.dtypes:
        peak = cpu_core(probe, dtype).bf16 * 1e3
        yield f"  products in {dtype}: up to {peak:,.0f} GFLOP/s"
    yield f"  memory: {probe.bandwidth:.1f} GB/s"
    yield (
        f"  a layer on the host: {probe.layer_forward_s * 1e6:,.0f} us forward, "
        f"{probe.layer_train_s * 1e6:,.0f} us forward and backward"
    )
    yield f"  between two processes: {probe.link:.2f} GB/s, {2 * probe.hop_s * 1e3:.2f} ms at least"
    yield f"  decoding with a small model: {probe.decode_tokens_s:,.0f} tokens/s"


def picture(one: SimulatedPlan, cluster: Cluster) -> str:
    """Return an SVG of a plan: busy time of each group of devices, and its memory."""
    plan, ranked = one.ranked.plan, one.ranked
    devices = "cores" if cluster.gpu.products else "GPUs"
    step_s = seconds_text(ranked.estimate.seconds)
    bars: list[tuple[str, float, MemoryNeed]] = []
    trainer_busy = generation_busy = 1.0
    if one.result is not None:
        trainer_busy, generation_busy = one.result.trainer_busy, one.result.generation_busy
    for name, trainer in plan.trainers.items():
        title = f"{trainer.num_gpus} {devices}: {name} {as_layout(trainer)}"
        bars.append((title, trainer_busy, ranked.memory[name]))
    title = f"{plan.generation_gpus} {devices}: {plan.replicas} replicas tp{plan.generation.tp}"
    bars.append((title, generation_busy, ranked.memory["generation"]))
    height = (len(bars) * 2 + 2) * (BAR + GAP) + 40
    device = cluster.gpu.memory_bytes
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="sans-serif" font-size="12">',
        f"<title>Plan with {plan.num_gpus} {devices}: {step_s} s a step</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    y = 24
    parts.append(
        _text(10, y - 8, f"Time of one step, {seconds_text(ranked.estimate.seconds)} s", bold=True)
    )
    for name, busy, _ in bars:
        parts += _bar(y, name, busy, f"busy {busy:.0%}", "busy", "idle")
        y += BAR + GAP
    y += 24
    title = f"Memory of one {cluster.gpu.name}, {device / GB:.0f} GB"
    parts.append(_text(10, y - 8, title, bold=True))
    for name, _, need in bars:
        share = min(need.total / device, 1.0)
        parts += _bar(y, name, share, f"{need.total / GB:.0f} GB", "memory", "free")
        y += BAR + GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(y: int, name: str, share: float, label: str, full: str, rest: str) -> list[str]:
    x, width = LEFT + 60, WIDTH - LEFT - 80
    return [
        _text(10, y + 15, name),
        f'<rect x="{x}" y="{y}" width="{width}" height="{BAR}" fill="{COLORS[rest]}"/>',
        f'<rect x="{x}" y="{y}" width="{width * share:.1f}" height="{BAR}" fill="{COLORS[full]}"/>',
        _text(x + 6, y + 15, label, color="white" if share > 0.15 else "black"),
    ]


def _text(x: float, y: float, text: str, *, bold: bool = False, color: str = "black") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" fill="{color}"{weight}>{escape(text)}</text>'


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        yield "  ".join(padded).rstrip()
