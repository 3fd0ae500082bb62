"""Predict on which GPUs options of generation pay: speculation, 8-bit weights, 8-bit KV cache.

    python -m rlsys.planner.rollout_options Qwen/Qwen3-8B --cluster 1xH100 --context 2000

For each number of running requests of a replica: the time of a decoding step, the tokens per second
with each option over those without, and the share of accepted tokens
(`engine/draft_acceptance/ACTOR`) from which speculation pays. "-" means that the KV cache does not
hold so many requests, or that an option is not available: 8 bits without such products on the GPU,
fp8 weights of a mixture of experts. Times are those of decode_time.py, in closed form. Each request
has a draft of all its tokens in each pass, so the gain of n-grams is an upper bound. Looking up
n-grams and the engine's work for them on the host are not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlsys.errors import InvalidValue, require
from rlsys.planner.architecture import Architecture
from rlsys.planner.config_fields import read_config
from rlsys.planner.decode_time import decode_parts
from rlsys.planner.hardware import Cluster, parse_cluster
from rlsys.planner.memory import kv_capacity
from rlsys.planner.model_config import architecture_from_config, named_model
from rlsys.planner.plans import GenerationPlan
from rlsys.planner.profiles import Constants, fitted_constants
from rlsys.planner.run_plan import PLAIN_GENERATION

# Parts of a step that a head with one layer has too.
LAYER_PARTS = ("products", "experts", "layers", "communication", "kv_cache")


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Costs of speculation for a number of running requests.

    Attributes:
        drafted: Tokens of a draft.
        cost: Time of a step with its drafts over that of a plain step.
    """

    drafted: int
    cost: float

    @property
    def pays_from(self) -> float:
        """The share of accepted tokens from which it pays. Above 1: it never does."""
        return (self.cost - 1) / self.drafted

    def speedup(self, acceptance: float) -> float:
        """Return tokens/s over those without, if this share of the drafted tokens is accepted."""
        return (1 + self.drafted * acceptance) / self.cost


def speculation(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    batch: float,
    context: float,
    *,
    drafted: int = 4,
    has_head: bool = False,
    constants: Constants | None = None,
) -> Speculation:
    """Return the costs of drafts.

    Args:
        model: The policy.
        cluster: Where the replica is.
        plan: The replica's layout.
        batch: Running requests.
        context: Mean tokens of a request so far.
        drafted: Tokens of a draft.
        has_head: Whether a head of one layer drafts (EAGLE-3), token by token. n-grams cost
            nothing.
        constants: Constants and profiles; those of the package by default.
    """
    constants = constants or fitted_constants()
    plain = decode_parts(model, cluster, plan, batch, context, constants)
    checked = decode_parts(model, cluster, plan, batch, context, constants, drafted)
    # Measured all-reduces may take less time with more tokens.
    seconds = sum(max(checked[name], plain[name]) for name in plain)
    if has_head:
        layer = sum(plain[name] for name in LAYER_PARTS) / model.layers
        seconds += drafted * (layer + plain["head"])
    return Speculation(drafted=drafted, cost=seconds / sum(plain.values()))


def precision_speedup(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    batch: float,
    context: float,
    *,
    weights: str = "",
    kv: str = "",
    constants: Constants | None = None,
) -> float:
    """Return tokens/s with other precisions of weights or keys and values over those of the plan.

    Arguments as those of `speculation`; `weights` and `kv` as those of `GenerationPlan`.
    """
    constants = constants or fitted_constants()
    other = replace(plan, weights=weights or plan.weights, kv=kv or plan.kv)
    seconds = [
        sum(decode_parts(model, cluster, one, batch, context, constants).values())
        for one in (plan, other)
    ]
    return seconds[0] / seconds[1]


def table(
    model: Architecture,
    cluster: Cluster,
    batches: Sequence[int],
    context: int,
    *,
    tp: int,
    drafted: int,
    acceptance: float,
) -> Iterator[list[str]]:
    """Yield the rows of the table, its header first."""
    plan = replace(PLAIN_GENERATION, tp=tp)
    yield [
        "running requests",
        "ms of a step",
        "fp8 keys and values",
        "fp8 weights",
        "n-grams pay from",
        f"with {_percent(acceptance)}",
        "EAGLE-3 pays from",
        f"with {_percent(acceptance)}",
    ]
    for batch in batches:
        if batch * context > kv_capacity(model, cluster, plan, row_tokens=context):
            yield [str(batch), *["-"] * 7]
            continue
        of_model = (model, cluster, plan, batch, context)
        seconds = sum(decode_parts(*of_model, fitted_constants()).values())
        cells = [str(batch), f"{1000 * seconds:.1f}"]
        for kv, weights in (("fp8", ""), ("", "fp8_block")):
            is_supported = cluster.gpu.fp8 and not (weights and model.is_moe)
            gain = precision_speedup(*of_model, kv=kv, weights=weights)
            cells.append(f"{gain:.2f}" if is_supported else "-")
        for has_head in (False, True):
            found = speculation(*of_model, drafted=drafted, has_head=has_head)
            pays = found.pays_from
            cells.append("never" if pays > 1 else _percent(pays))
            cells.append(f"{found.speedup(acceptance):.2f}")
        yield cells


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def model_named(name: str) -> Architecture:
    """Return a model of the table, or one of a folder with a config.json."""
    if Path(name).is_dir():
        return architecture_from_config(read_config(Path(name) / "config.json"), name=name)
    return named_model(name)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rlsys.planner.rollout_options",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a model of the planner's table, or a folder")
    parser.add_argument("--cluster", default="1xH100", help="default: 1xH100")
    parser.add_argument("--context", type=int, default=2000, help="mean tokens of a request so far")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel GPUs of a replica")
    parser.add_argument("--num-tokens", type=int, default=4, help="tokens of a draft")
    parser.add_argument("--accepted", type=float, default=0.4, help="share of drafted tokens")
    options = parser.parse_args(argv)
    try:
        model, cluster = model_named(options.model), parse_cluster(options.cluster)
        _check(options, model, cluster)
    except InvalidValue as error:
        parser.error(str(error))
    rows = list(
        table(
            model,
            cluster,
            options.requests,
            options.context,
            tp=options.tp,
            drafted=options.num_tokens,
            acceptance=options.accepted,
        )
    )
    rows.insert(1, ["---"] * len(rows[0]))
    for cells in rows:
        print("|", " | ".join(cells), "|")
    return 0


def _check(options: argparse.Namespace, model: Architecture, cluster: Cluster) -> None:
    require(
        0 < options.context <= model.max_context,
        "context",
        options.context,
        rule=f"must be above 0 and at most the context of {model.name}, {model.max_context}",
        fix="Use another length.",
    )
    require(
        min(options.requests) >= 1,
        "requests",
        options.requests,
        rule="must be at least 1",
        fix="Use 1 or more requests.",
    )
    require(
        1 <= options.num_tokens <= 32,
        "num_tokens",
        options.num_tokens,
        rule="must be from 1 to 32",
        fix="Use 4.",
    )
    require(
        0 <= options.accepted <= 1,
        "accepted",
        options.accepted,
        rule="must be from 0 to 1",
        fix="Use 0.4.",
    )
    require(
        1 <= options.tp <= cluster.per_node and model.heads % options.tp == 0,
        "tp",
        options.tp,
        rule=f"must divide {model.heads}, the model's heads, and be at most {cluster.per_node}, "
        "the GPUs of a node",
        fix="Use another number of GPUs for a replica.",
    )


if __name__ == "__main__":
    sys.exit(main())
