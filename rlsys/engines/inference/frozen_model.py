"""A frozen model: a reference, a teacher, a critic or a reward model that only answers.

    rows ─► passes of at most max_tokens ─► Role ─► an array a row

It has its model in the precision that it computes in, and nothing else: no optimizer, no float32
masters. What a loss says of rows that are not trained on, `judge` tells. `infer` is also how the
training engine answers for a model that it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch

from rlsys.algorithms.aggregation import Aggregation
from rlsys.algorithms.loss_inputs import whole_groups
from rlsys.engines.devices.device_lock import DeviceLock
from rlsys.engines.devices.malloc_tuning import keep_freed_memory
from rlsys.engines.models.attention_context import context_length
from rlsys.engines.models.branches import Paths, longest_path
from rlsys.engines.models.collate import split_passes
from rlsys.engines.models.loss_calls import call_aggregation
from rlsys.engines.models.model_roles import HeadKind, Loss, Policy, Role, load_role
from rlsys.engines.models.step_statistics import StepStatistics, StepSums
from rlsys.engines.training.ranks import Ranks
from rlsys.types import Float32Array, TrainRow


def infer(
    role: Role, rows: Sequence[TrainRow], *, max_tokens: int, ranks: Ranks, top_k: int = 0
) -> list[Float32Array]:
    """Of each row, whatever its loss mask and columns: log-probabilities or values [T], or a score
    [1]; with `top_k`, of a Policy, what it says of the likeliest tokens [T * (2 top_k + 1)];
    without gradient. Zeros for a token that nothing stands before (rlsys.engines.models.branches).
    A collective: every rank brings its share of rows, which may be none.
    """
    found = [np.zeros(role.num_inferred(row), np.float32) for row in rows]
    indices = [index for index, array in enumerate(found) if len(array)]
    chosen_rows = [rows[index] for index in indices]
    passes = split_passes(chosen_rows, max_tokens, packed=role.packs, shares=role.shares)
    with torch.no_grad():
        passes += [[]] * (ranks.max(len(passes)) - len(passes))
        of_passes = [[chosen_rows[index] for index in chosen] for chosen in passes]
        if top_k and isinstance(role, Policy):
            said = role.infer_likeliest(of_passes, top_k)
        else:
            said = role.infer(of_passes)
        for chosen, numbers in zip(passes, said, strict=True):
            lengths = [len(found[indices[index]]) for index in chosen]
            for index, part in zip(chosen, numbers.cpu().split(lengths), strict=True):
                row = chosen_rows[index]
                if row.branches is not None and role.unit == "token":
                    part[Paths.of(row).unpredicted] = 0.0
                found[indices[index]] = part.flatten().numpy()
    return found


class InferenceEngine:
    """One process's copy of a frozen model."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        head: HeadKind,
        dtype: str = "float32",
        device: str = "cpu",
        num_threads: int | None = None,
        max_tokens: int = 16384,
        temperature: float = 1.0,
        top_k: int = 0,
        shares_device: bool = False,
    ) -> None:
        """`max_tokens`: of one pass. `temperature`: of the log-probabilities. `num_threads`: of
        this process; by default as it is. `top_k`: the likeliest tokens are asked for, not those of
        the rows. `shares_device`: the weights are there only while this engine works, and no other
        that shares it does meanwhile.

        Raises ValueError for a directory that holds no model with this head, and for a `top_k`
        beyond its vocabulary.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._device = torch.device(device)
        if self._device.type == "cpu":
            keep_freed_memory()
        self._max_tokens = max_tokens
        self._top_k = top_k
        self._role = load_role(
            model_path,
            head=head,
            dtype=dtype,
            trained=False,
            temperature=temperature,
            device=self._device,
        )
        self._role.network.requires_grad_(False).to(self._device)
        network = self._role.network
        self._turn: Callable[[], AbstractContextManager[None]] = nullcontext
        if shares_device:
            self._turn = DeviceLock(network, self._device).taken
        config = network.model.config
        self._vocab_size: int = config.get_text_config().vocab_size
        self._context = context_length(config)
        if top_k > self._vocab_size:
            raise ValueError(
                f"top_k={top_k} asks for more tokens than the {self._vocab_size} of the vocabulary "
                f"of {str(model_path)!r}; use at most that."
            )

    def judge(
        self,
        rows: Sequence[TrainRow],
        *,
        loss: Loss,
        aggregation: Aggregation,
        on_pass: Callable[[], None],
    ) -> StepSums:
        """What a loss says of rows that are not trained on, summed up as in training; `on_pass` is
        called after every pass. Raises ValueError as `infer` does.
        """
        self._check(rows)
        role, sums = self._role, StepStatistics()
        columns = role.columns(loss, rows)
        weights = []
        for row in rows:
            sizes = (row.group_size, role.num_in_group(row), role.num_trained(row))
            weight, denominator = call_aggregation(aggregation, *sizes)
            sums.add_rollout(
                denominator=denominator,
                num_places=role.num_trained(row),
                num_tokens=int(row.loss_mask.sum()),
                staleness=0,
            )
            weights.append(weight)
        passes = split_passes(
            rows,
            self._max_tokens,
            packed=role.packs,
            shares=role.shares,
            whole_groups=whole_groups(loss),
        )
        with self._turn(), torch.no_grad():
            for chosen in passes:
                batch = role.collate([rows[index] for index in chosen], columns)
                of_rows = torch.tensor([weights[index] for index in chosen], device=self._device)
                losses, told = role.learn(loss, batch, torch.zeros_like(batch.row_index))
                sums.add_pass((of_rows[batch.row_index] * losses).sum(), told)
                on_pass()
        return sums.reduce(Ranks(0, 1), torch.zeros((), dtype=torch.float64))

    def infer(self, rows: Sequence[TrainRow]) -> list[Float32Array]:
        """In the rows' order: log-probabilities [T] of the completion tokens (head "logits"), or
        [T * (2 top_k + 1)] (of each, the likeliest tokens' ids, then their log-probabilities, then
        that of all others together), values [T] of the text before each of them ("value"), or the
        row's score [1] ("score").

        Raises ValueError for a row without a prompt, longer than the model's context, or with a
        token beyond its vocabulary.
        """
        self._check(rows)
        with self._turn():
            return infer(
                self._role, rows, max_tokens=self._max_tokens, ranks=Ranks(0, 1), top_k=self._top_k
            )

    def _check(self, rows: Sequence[TrainRow]) -> None:
        for row in rows:
            length = longest_path(row)
            if length > self._context:
                raise ValueError(
                    f"a row of group {row.group_id} has {length} tokens, but this model takes "
                    f"{self._context}; lower data.max_prompt_tokens or sampling.max_tokens."
                )
            for tokens in (row.prompt_token_ids, row.token_ids):
                if len(tokens) and tokens.max() >= self._vocab_size:
                    raise ValueError(
                        f"a row of group {row.group_id} has token {tokens.max()}, but this model "
                        f"has {self._vocab_size} tokens; give one with the policy's tokenizer."
                    )
