"""What a run reads before Ray starts: its model's shape, its tokenizer, its data; and the trial of
its rewards on the first row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlsys.config import RunConfig
from rlsys.data.prompts import load_tokenizer
from rlsys.data.row_source import RowSource
from rlsys.dataflow.graph import Dataflow
from rlsys.dataflow.stages import PlayStage, ScoreStage
from rlsys.estimate import ModelShape, model_shape
from rlsys.launching import HeldOut, WarmStart
from rlsys.rewards import as_rewards
from rlsys.rewards.trial import trial_rollout, try_rewards

from .preparation import check_held_out, check_warm_start, load_prompts


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The model's shape, the tokenizer and the data of a run, all checked."""

    shape: ModelShape
    tokenizer: Any
    prompts: RowSource


def read_inputs(
    config: RunConfig,
    flow: Dataflow,
    held_out: HeldOut,
    warm_start: WarmStart | None,
    lacking: list[str] | None = None,
) -> Inputs:
    """Read and check what the run begins with. Raises ValueError for mistakes; see `load_prompts`
    for `lacking`."""
    shape = model_shape(config.model.path, flow.main.head)
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_prompts(config, flow, tokenizer, shape, lacking)
    check_held_out(config, flow, held_out, tokenizer, shape)
    check_warm_start(warm_start, tokenizer)
    return Inputs(shape=shape, tokenizer=tokenizer, prompts=prompts)


async def tried_rewards(
    config: RunConfig, flow: Dataflow, held_out: HeldOut, read: Inputs
) -> list[str]:
    """Call each reward once on the first row; return warnings.

    Held-out rewards are tried on it too, where it has the columns that they require. Episodes of an
    environment are not played. Raises ValueError for a reward that returns no number.
    """
    scored = [one for stage in flow.all(ScoreStage) for one in as_rewards(stage.rewards)]
    rewards = {one.name: one for one in scored}
    columns = read.prompts.metadata_columns
    if config.evaluation.every and held_out.rewards is not None and not flow.all(PlayStage):
        for one in as_rewards(held_out.rewards):
            if all(column in columns for column in one.required_columns):
                rewards.setdefault(one.name, one)
    if not rewards:
        return []
    return await try_rewards(
        [*rewards.values()],
        trial_rollout(read.prompts.at(0), read.tokenizer),
        config.reward,
        start_timeout_s=config.cluster.start_timeout_s,
    )
