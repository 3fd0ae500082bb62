"""Inputs that a run reads before Ray starts: model shape, tokenizer and data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlsys.config import RunConfig
from rlsys.data.prompts import load_tokenizer
from rlsys.data.row_source import RowSource
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import PlayStage, ScoreStage
from rlsys.engines.models.export_settings import check_exportable
from rlsys.engines.models.model_shape import ModelShape, model_shape
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.rewards import as_rewards
from rlsys.rewards.reward_trial import trial_rollout, try_rewards


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Model shape, tokenizer and data of a run, after all checks."""

    shape: ModelShape
    tokenizer: Any
    prompts: RowSource
    warnings: tuple[str, ...] = ()


def check_exports(
    config: RunConfig, flow: Dataflow, shape: ModelShape, tokenizer: Any
) -> list[str]:
    """Check the settings that the exports of all policies contain; return warnings.

    Raises:
        ValueError: A model's settings cannot be exported.
    """
    generates = flow.main.head == "logits"
    warnings = check_exportable(config.model.path, shape.config, tokenizer, generates=generates)
    for name in flow.other_policies:
        role, setting = flow.models[name].config, f"{name}.model.path"
        if role is not None and (path := role.model.path):
            own = model_shape(path, setting=setting).config
            used = load_tokenizer(path, setting=setting)
            warnings += check_exportable(path, own, used, generates=True, setting=setting)
    return warnings


async def tried_rewards(
    config: RunConfig, flow: Dataflow, held_out: HeldOut, prompts: RowSource, tokenizer: Any
) -> list[str]:
    """Call each reward once on the first row; return warnings.

    Held-out rewards are called too if the row has the columns that they require. Episodes of an
    environment are not played.

    Raises:
        ValueError: A reward does not return a number.
    """
    scored = [one for stage in flow.all(ScoreStage) for one in as_rewards(stage.rewards)]
    rewards = {one.name: one for one in scored}
    columns = prompts.metadata_columns
    if config.evaluation.every and held_out.rewards is not None and not flow.all(PlayStage):
        for one in as_rewards(held_out.rewards):
            if all(column in columns for column in one.required_columns):
                rewards.setdefault(one.name, one)
    if not rewards:
        return []
    return await try_rewards(
        [*rewards.values()],
        trial_rollout(prompts.at(0), tokenizer),
        config.reward,
        start_timeout_s=config.cluster.start_timeout_s,
    )
