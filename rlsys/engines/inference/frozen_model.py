"""Inference engine of a frozen model: a reference, a teacher, a critic or a reward model.

    rows ─► micro-batches of at most max_tokens ─► Role ─► one array per row

The engine holds the model in its compute precision only: no optimizer, no float32 master weights.
`judge` evaluates a loss on rows that are not trained on. The training engine uses `infer` too, for
the model that it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch

from rlsys.algorithms.aggregation import Aggregation
from rlsys.algorithms.loss_inputs import whole_groups
from rlsys.engines.devices.cpu import keep_freed_memory
from rlsys.engines.devices.device_lock import DeviceLock
from rlsys.engines.models.attention_context import context_length
from rlsys.engines.models.branches import Paths, longest_path
from rlsys.engines.models.collate import split_passes
from rlsys.engines.models.loss_calls import call_aggregation
from rlsys.engines.models.model_roles import HeadKind, Loss, Policy, Role, load_role
from rlsys.engines.models.step_statistics import StepStatistics, StepSums
from rlsys.engines.training.ranks import Ranks
from rlsys.errors import require
from rlsys.types import Float32Array, TrainRow


def infer(
    role: Role,
    rows: Sequence[TrainRow],
    *,
    max_tokens: int,
    ranks: Ranks,
    top_k: int = 0,
    with_own: bool = False,
) -> list[Float32Array]:
    """Return log-probabilities or values [T], or a score [1], of each row, without gradient.

    Loss masks and columns are ignored. With `top_k`, a Policy returns the likeliest tokens [T * (2
    top_k + 1)], and `with_own` puts the log-probability of the row's token before those of each
    place, [T * (2 top_k + 2)]. Tokens without a predecessor (rlsys.engines.models.branches) get
    zeros. A collective: every rank gives its share of rows, which may be empty.
    """
    found = [np.zeros(role.num_inferred(row), np.float32) for row in rows]
    indices = [index for index, array in enumerate(found) if len(array)]
    chosen_rows = [rows[index] for index in indices]
    passes = split_passes(chosen_rows, max_tokens, packed=role.packs, shares=role.shares)
    with torch.no_grad():
        passes += [[]] * (ranks.max(len(passes)) - len(passes))
        of_passes = [[chosen_rows[index] for index in chosen] for chosen in passes]
        if top_k and isinstance(role, Policy):
            outputs = role.infer_likeliest(of_passes, top_k, with_own=with_own)
        else:
            outputs = role.infer(of_passes)
        for chosen, numbers in zip(passes, outputs, strict=True):
            lengths = [len(found[indices[index]]) for index in chosen]
            for index, part in zip(chosen, numbers.cpu().split(lengths), strict=True):
                row = chosen_rows[index]
                if row.branches is not None and role.unit == "token":
                    part[Paths.of(row).unpredicted] = 0.0
                found[indices[index]] = part.flatten().numpy()
    return found


class InferenceEngine:
    """Copy of a frozen model in one process; `role` is the model with its head."""

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
        """Load the model.

        Args:
            model_path: Directory or hub name of the model.
            head: Head of the model.
            dtype: Precision of weights and computation.
            device: Device of the model.
            num_threads: CPU threads of this process. By default the number is not changed.
            max_tokens: Maximum input tokens per micro-batch.
            temperature: Temperature of the log-probabilities.
            top_k: If set, `infer` returns the likeliest tokens instead of the rows' tokens.
            shares_device: Keep the weights on the device only while the engine computes, and
                exclude other engines that share it meanwhile.

        Raises:
            InvalidValue: The directory has no model with this head, or `top_k` exceeds the
                vocabulary.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._device = torch.device(device)
        if self._device.type == "cpu":
            keep_freed_memory()
        self._max_tokens = max_tokens
        self._top_k = top_k
        self.role = load_role(
            model_path,
            head=head,
            dtype=dtype,
            trained=False,
            temperature=temperature,
            device=self._device,
        )
        self.role.network.requires_grad_(False).to(self._device)
        network = self.role.network
        self._hold_device: Callable[[], AbstractContextManager[None]] = nullcontext
        if shares_device:
            self._hold_device = DeviceLock(network, self._device).hold
        config = network.model.config
        self._vocab_size: int = config.get_text_config().vocab_size
        self._context = context_length(config)
        require(
            top_k <= self._vocab_size,
            "top_k",
            top_k,
            rule=f"must be at most the vocabulary size of {str(model_path)!r}",
            fix=f"Use at most {self._vocab_size}.",
        )

    def judge(
        self,
        rows: Sequence[TrainRow],
        *,
        loss: Loss,
        aggregation: Aggregation,
        on_pass: Callable[[], None],
    ) -> StepSums:
        """Return the sums of a loss over rows that are not trained on, as training computes them.

        `on_pass` is called after every micro-batch. Raises InvalidValue as `infer` does.
        """
        self._check(rows)
        role, sums = self.role, StepStatistics()
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
        with self._hold_device(), torch.no_grad():
            for chosen in passes:
                batch = role.collate([rows[index] for index in chosen], columns)
                of_rows = torch.tensor([weights[index] for index in chosen], device=self._device)
                losses, values = role.learn(loss, batch, torch.zeros_like(batch.row_index))
                sums.add_pass((of_rows[batch.row_index] * losses).sum(), values)
                on_pass()
        return sums.reduce(Ranks(0, 1), torch.zeros((), dtype=torch.float64))

    def infer(self, rows: Sequence[TrainRow]) -> list[Float32Array]:
        """Return one array per row, in the rows' order.

        Head "logits" gives log-probabilities [T] of the completion tokens. With `top_k` it gives [T
        * (2 top_k + 1)]: per token the ids of the likeliest tokens, their log-probabilities, and
        the log-probability of all others together. Head "value" gives values [T] of the text before
        each completion token, and head "score" the row's score [1].

        Raises InvalidValue for a row without a prompt, longer than the model's context, or with a
        token outside the vocabulary.
        """
        self._check(rows)
        with self._hold_device():
            return infer(
                self.role, rows, max_tokens=self._max_tokens, ranks=Ranks(0, 1), top_k=self._top_k
            )

    def _check(self, rows: Sequence[TrainRow]) -> None:
        for row in rows:
            length = longest_path(row)
            require(
                length <= self._context,
                "tokens of a row",
                length,
                rule=f"a row of group {row.group_id} exceeds the model's context of "
                f"{self._context} tokens",
                fix="Lower data.max_prompt_tokens or sampling.max_tokens.",
            )
            for tokens in (row.prompt_token_ids, row.token_ids):
                largest = int(tokens.max(initial=0))
                require(
                    largest < self._vocab_size,
                    "token id",
                    largest,
                    rule=f"a row of group {row.group_id} has a token outside the vocabulary of "
                    f"{self._vocab_size}",
                    fix="Give a model with the policy's tokenizer.",
                )
