"""The training loss on held-out completions.

    held-out rows ─► prompts with completions ─► training rows ─► the train stage's loss ─► mean

It exists for graphs that train on a dataset (flow.dataset) if the loss reads no columns of other
stages, as in supervised learning or for a reward model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsys import metrics
from rlsys.algorithms.aggregation import Aggregation
from rlsys.config import RunConfig
from rlsys.data.prompts import load_policy_tokenizer
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import (
    IMPLICIT_COLUMNS,
    NUM_TOKENS,
    PREFERENCE,
    TRUNCATED,
    DatasetStage,
    Head,
)
from rlsys.engines.inference.frozen_model import InferenceEngine
from rlsys.engines.models.model_shape import model_shape
from rlsys.evaluation.model_evaluation import EvaluationConfig, Rows, held_out_prompts
from rlsys.types import Completion, Prompt, TrainRow


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Loss to compute for each evaluated model.

    Attributes:
        head: Head of the model.
        loss: Loss function of the train stage.
        aggregation: Aggregation of the train stage.
        completions: Column of the completions, and their number per row.
        preferences: Whether the first completion of a row is the better one.
        pass_tokens: Maximum number of tokens of a forward pass.
    """

    head: Head
    loss: Callable[..., Any]
    aggregation: Aggregation
    completions: tuple[str, int]
    preferences: bool
    pass_tokens: int

    def metrics(
        self, config: EvaluationConfig, *, rows: Rows | None, on_pass: Callable[[], None]
    ) -> dict[str, float]:
        """Return the loss of a model and its metrics, with the names of evaluations.jsonl.

        Args:
            config: The model and the data.
            rows: Rows that replace the dataset.
            on_pass: Called after each forward pass.

        Raises:
            ValueError: The data has no such completions, or cannot be used.
        """
        tokenizer = load_policy_tokenizer(config.model.path, config.data.template_options)
        prompts = self.prompts(config, tokenizer, rows)
        engine = InferenceEngine(
            config.model.path,
            head=self.head,
            dtype=config.model.dtype,
            device="cuda" if config.rollout.num_gpus else "cpu",
            num_threads=max(1, int(config.rollout.num_cpus)),
            max_tokens=self.pass_tokens,
        )
        began = time.monotonic()
        sums = engine.judge(
            train_rows(prompts), loss=self.loss, aggregation=self.aggregation, on_pass=on_pass
        )
        return {
            metrics.EVAL_LOSS: sums.loss,
            **{metrics.of_held_out(name): mean for name, mean in sums.means.items()},
            metrics.EVAL_PROMPTS: len(prompts),
            metrics.TIME_EVALUATION_S: time.monotonic() - began,
        }

    def prompts(self, config: EvaluationConfig, tokenizer: Any, rows: Rows | None) -> list[Prompt]:
        """Return the held-out prompts with their completions.

        Raises:
            ValueError: The data cannot be used, or has too few rows.
        """
        context = model_shape(config.model.path, self.head).max_context
        return held_out_prompts(
            config,
            tokenizer,
            context,
            (),
            rows,
            self.completions,
            preferences=self.preferences,
            of_a_run=True,
        )


def held_out_loss(run: RunConfig, flow: StageGraph) -> HeldOutLoss | None:
    """Return the held-out loss of a graph, or None if its loss needs more than a dataset."""
    source, stage = flow.source, flow.trained(flow.main.name)
    if not isinstance(source, DatasetStage):
        return None
    if any(column not in (*source.writes, *IMPLICIT_COLUMNS) for column in stage.trains_on):
        return None
    return HeldOutLoss(
        head=stage.model.head,
        loss=stage.loss,
        aggregation=stage.aggregation,
        completions=(source.completions, source.group_size),
        preferences=flow.reads(PREFERENCE),
        pass_tokens=run.trainer.micro_batch_tokens,
    )


def train_rows(prompts: Sequence[Prompt]) -> list[TrainRow]:
    """Return the training rows of the prompts' completions, group by group."""
    rows = []
    for prompt in prompts:
        masks = [_mask(completion) for completion in prompt.completions]
        num_trained = int(sum(mask.sum() for mask in masks))
        for place, (completion, mask) in enumerate(zip(prompt.completions, masks, strict=True)):
            num_tokens = len(mask)
            implicit = {
                NUM_TOKENS: num_tokens,
                TRUNCATED: 0,
                PREFERENCE: -1 if place else 1,
            }
            rows.append(
                TrainRow(
                    prompt_token_ids=np.array(prompt.token_ids, np.int32),
                    token_ids=np.array(completion.token_ids, np.int32),
                    policy_versions=np.zeros(num_tokens, np.int32),
                    loss_mask=mask,
                    columns={
                        column.name: np.full(num_tokens, value, np.float32)
                        for column, value in implicit.items()
                    },
                    group_id=prompt.index,
                    group_size=len(masks),
                    group_num_tokens=num_trained,
                )
            )
    return rows


def _mask(completion: Completion) -> np.ndarray[Any, np.dtype[np.bool_]]:
    if completion.loss_mask is None:
        return np.ones(len(completion.token_ids), np.bool_)
    return np.array(completion.loss_mask)
