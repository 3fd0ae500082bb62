"""The loss of a model on held-out completions: what training on a dataset lowers, on other rows.

    held-out rows ─► prompts with completions ─► rows of training ─► the train stage's loss ─► mean

Told of graphs that train on what a dataset holds (flow.dataset), where the loss reads nothing that
another stage writes: of supervised learning, of a reward model.
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
from rlsys.dataflow.graph.graph import Dataflow
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
    """What is asked of each model."""

    head: Head
    loss: Callable[..., Any]
    aggregation: Aggregation
    completions: tuple[str, int]
    """The column, and how many a row has."""
    preferences: bool
    """Return whether the first of them is the better one."""
    pass_tokens: int
    """Of one pass, at most."""

    def metrics(
        self, config: EvaluationConfig, *, rows: Rows | None, on_pass: Callable[[], None]
    ) -> dict[str, float]:
        """Of the model of `config`: the loss and its metrics, as evaluations.jsonl names them.
        `rows` replace the dataset; `on_pass` is called after every pass. Raises ValueError for rows
        without such completions.
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
        """Raises ValueError for data that cannot be used, or is too little."""
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


def held_out_loss(run: RunConfig, flow: Dataflow) -> HeldOutLoss | None:
    """What a graph asks for; None where its loss is not of what a dataset holds alone."""
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
    """The completions of prompts, group by group."""
    rows = []
    for prompt in prompts:
        masks = [_mask(completion) for completion in prompt.completions]
        num_trained = int(sum(mask.sum() for mask in masks))
        for place, (completion, mask) in enumerate(zip(prompt.completions, masks, strict=True)):
            num_tokens = len(mask)
            facts = {
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
                        fact.name: np.full(num_tokens, value, np.float32)
                        for fact, value in facts.items()
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
