"""Checks of the evaluation during training and of the warm start, before Ray starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlsys.config import HeldOutConfig, RunConfig
from rlsys.data.completions import encode_examples
from rlsys.data.source_names import may_have_splits
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import PlayStage
from rlsys.engines.models.model_shape import ModelShape
from rlsys.errors import require
from rlsys.evaluation.held_out import environment_of, evaluation_config, rewards_of
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.evaluation.held_out_loss import held_out_loss
from rlsys.evaluation.model_evaluation import held_out_prompts, held_out_tasks
from rlsys.launcher.launching import WarmStart
from rlsys.rewards import as_rewards, pack_rewards
from rlsys.text.tokenizer_boundary import TokenizerBoundary


@dataclass(frozen=True, kw_only=True)
class HeldOutSummary:
    """The held-out data of a run, for the user: a note, and warnings about it."""

    note: str = ""
    warnings: tuple[str, ...] = ()


def check_held_out(
    config: RunConfig, flow: StageGraph, held_out: HeldOut, tokenizer: Any, shape: ModelShape
) -> HeldOutSummary:
    """Check that the evaluation during training has data and a score, and can be run.

    Raises:
        ValueError: A check failed.
    """
    every = config.evaluation.every
    if not every:
        return HeldOutSummary()
    for played in flow.all(PlayStage):
        require(
            not played.seats,
            "evaluation.every",
            every,
            rule=f"only {flow.main.name!r} plays in an evaluation, and the seats "
            f"{[seat for seat, _ in played.seats]} of {played.environment.name!r} belong to other "
            "models",
            fix="Use evaluation.every=0.",
        )
    for field in ("source", "split"):
        value = getattr(config.evaluation, field)
        require(
            held_out.rows is None or value == getattr(HeldOutConfig(), field),
            f"evaluation.{field}",
            value,
            rule="has no effect, since the recipe makes its own held-out rows",
            fix="Remove the option, or leave the rows out of rlsys.HeldOut.",
        )
    rewards, loss = rewards_of(flow, held_out), held_out_loss(config, flow)
    environment = environment_of(flow)
    if rewards:
        require(
            environment is None,
            "HeldOut.rewards",
            [one.name for one in as_rewards(rewards)],
            rule="these score completions, but episodes of flow.play have the reward of their "
            "environment",
            fix="Leave the rewards out, or return further metrics from the environment.",
        )
    require(
        bool(rewards) or loss is not None or environment is not None,
        "evaluation.every",
        every,
        rule="there is no score: the dataflow has no flow.score or flow.play, and its loss uses "
        "more than the completions of a dataset",
        fix="Give launch(held_out=rlsys.HeldOut(rewards=[...])), or use evaluation.every=0.",
    )
    require(
        flow.main.head == "logits" or not rewards,
        "evaluation.every",
        every,
        rule=f"{flow.main.name!r} cannot generate completions, since its head is "
        f"{flow.main.head!r}",
        fix="Give HeldOut no rewards, or use evaluation.every=0.",
    )
    has_split = flow.source.prompts.rows is None and (
        may_have_splits(config.data.source) or "[" in config.evaluation.split
    )
    require(
        held_out.rows is not None or bool(config.evaluation.source) or has_split,
        "evaluation.every",
        every,
        rule="there is no held-out data",
        fix="Give a file or dataset as evaluation.source, or rows as "
        "launch(held_out=rlsys.HeldOut(rows=...)).",
    )
    evaluated = evaluation_config(config, config.model.path)
    if rewards:
        pack_rewards(rewards)  # raises if a function cannot be pickled
    num = 0
    if environment is not None:
        num = len(held_out_tasks(evaluated, environment, held_out.rows, of_a_run=True))
    if loss is not None:
        num = len(loss.prompts(evaluated, tokenizer, held_out.rows))
    if rewards:
        prompts = held_out_prompts(
            evaluated,
            tokenizer,
            shape.max_context,
            as_rewards(rewards),
            held_out.rows,
            of_a_run=True,
        )
        num = len(prompts)
    return _summary(config, flow, held_out, num)


def _summary(config: RunConfig, flow: StageGraph, held_out: HeldOut, num: int) -> HeldOutSummary:
    """Return the source of the held-out rows, and a warning if training reads other data."""
    own = config.evaluation
    source, split = own.source or config.data.source, own.split
    if held_out.rows is not None:
        origin = "rows of the recipe (HeldOut.rows)"
    else:
        has_split = may_have_splits(source) or "[" in split
        field = "evaluation.source" if own.source else "data.source"
        origin = f"rows of {field}={source!r}" + (f", evaluation.split={split!r}" * has_split)
    warnings: tuple[str, ...] = ()
    if held_out.rows is not None and flow.source.prompts.rows is None:
        warnings = (
            f"training reads data.source={config.data.source!r}, but evaluations use the recipe's "
            "own held-out rows, and best/ is chosen by them. To evaluate on the same kind of data, "
            "leave the rows out of rlsys.HeldOut and use evaluation.source, or a part of the data "
            "as evaluation.split",
        )
    return HeldOutSummary(note=f"{num:,} {origin}", warnings=warnings)


def check_warm_start(warm_start: WarmStart | None, tokenizer: Any) -> None:
    """Check the first batch of a warm start.

    Raises:
        ValueError: Its examples are invalid or cannot be encoded.
    """
    if warm_start is None or not warm_start.num_steps:
        return
    encode_examples(TokenizerBoundary(tokenizer), warm_start.batch(1), step=1)
