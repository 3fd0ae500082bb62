"""Loading of weights that were saved for samplers: a base model with adapters, or a whole model.

Shape legend: I inputs and O outputs of a linear layer, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rlsys.engines.generation.torch.adapter_bank import NO_ADAPTER, AdapterBank
from rlsys.engines.inference.frozen_model import infer
from rlsys.engines.models.adapter_files import read_adapter
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.model_roles import Policy, load_role
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.training.adapters import ADAPTER
from rlsys.engines.training.ranks import Ranks
from rlsys.errors import InvalidValue
from rlsys.tinker_server.call_engine import WHOLE_MODEL
from rlsys.tinker_server.protobuf_messages import TopK
from rlsys.tinker_server.server_backend import Scores
from rlsys.types import Float32Array, Int32Array, TrainRow

ONE = 1  # number of the only adapter in a scorer's bank


def saved_tensors(
    base_path: str | Path, directory: Path | None, *, dtype: str
) -> dict[str, torch.Tensor]:
    """Return the `model_tensors` of saved weights, on the CPU. None: those of the base model.

    Raises:
        ValueError: The weights are damaged.
    """
    if directory is None or (directory / ADAPTER).is_dir():
        tensors = model_tensors(load_causal_lm(base_path, dtype=dtype))
        found = {name: tensor.detach() for name, tensor in tensors.items()}
        return found if directory is None else _adapted(found, directory / ADAPTER)
    tensors = model_tensors(load_causal_lm(directory / WHOLE_MODEL, dtype=dtype))
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _adapted(tensors: dict[str, torch.Tensor], directory: Path) -> dict[str, torch.Tensor]:
    """Add B A · alpha / R to each adapted weight, in float32 and rounded once.

    The trainer does the same when it publishes weights.
    """
    for layer, factors in read_adapter(directory).items():
        weight = f"{layer}.weight"
        added = factors.b @ factors.a  # [O, I]
        base = tensors.get(weight)
        if factors.is_turned or (base is not None and base.shape != added.shape):
            added = added.t()
        if base is None or base.shape != added.shape:
            raise InvalidValue(
                str(directory),
                rule=f"it has an adapter of {layer} with shape {list(added.shape)}, and the base "
                f"model has {'no such layer' if base is None else list(base.shape)}",
                fix="Use the base model that it was trained on.",
            )
        tensors[weight] = torch.add(base.float(), added, alpha=factors.scaling).to(base.dtype)
    return tensors


class SequenceScorer:
    """Scorer of given tokens, with weights that can be replaced."""

    def __init__(self, base_path: str | Path, *, dtype: str, device: str, max_tokens: int) -> None:
        self._base_path = base_path
        self._dtype = dtype
        self._max_tokens = max_tokens
        self._device = torch.device(device)
        self._network = load_role(
            base_path,
            head="logits",
            dtype=dtype,
            trained=False,
            temperature=1.0,
            device=self._device,
        ).network
        self._network.requires_grad_(False).to(device)
        self._bank = AdapterBank(self._network.model)
        self._whole: Path | None = None  # whole weights that are loaded; None: the base model
        self._key = ""

    @torch.no_grad()
    def take(self, key: str, directory: Path | None) -> None:
        """Load the weights of `directory`, unless they are loaded.

        An adapter is added to the base model, which stays.

        Raises:
            OSError: A file cannot be read.
            ValueError: The weights are damaged, or of another base model.
        """
        if key == self._key:
            return
        self._key = ""
        is_adapter = directory is not None and (directory / ADAPTER).is_dir()
        whole = None if is_adapter else directory
        if whole != self._whole:
            found = saved_tensors(self._base_path, whole, dtype=self._dtype)
            for name, tensor in model_tensors(self._network.model).items():
                tensor.copy_(found[name])
            self._whole = whole
        if is_adapter:
            assert directory is not None
            self._bank.add(ONE, self._bank.read(directory / ADAPTER))
        chosen = np.array([ONE if is_adapter else NO_ADAPTER])
        self._bank.select(chosen, chosen, num_rows=1)  # all rows of a pass as one
        self._key = key

    def score(
        self, rows: Sequence[Int32Array], *, top_k: int = 0, temperature: float = 1.0
    ) -> list[Scores]:
        """Return the scores of each row, from one forward pass."""
        found = infer(
            Policy(self._network, self._device, temperature),
            [_row(one) for one in rows],
            max_tokens=self._max_tokens,
            ranks=Ranks(0, 1),
            top_k=top_k,
            with_own=True,
        )
        return [_with_top_k(one, top_k) if top_k else Scores(logprobs=one) for one in found]


def _with_top_k(found: Float32Array, k: int) -> Scores:
    """Split the array of a row, as `infer` returns it with its own log-probabilities."""
    own, ids, logprobs, _ = np.split(found.reshape(-1, 2 * k + 2), [1, 1 + k, 1 + 2 * k], axis=1)
    return Scores(logprobs=own[:, 0], top_k=TopK(token_ids=ids.astype(np.int32), logprobs=logprobs))


def _row(token_ids: Int32Array) -> TrainRow:
    size = len(token_ids) - 1
    return TrainRow(
        prompt_token_ids=token_ids[:1],
        token_ids=token_ids[1:],
        policy_versions=np.zeros(size, np.int32),
        loss_mask=np.ones(size, np.bool_),
        columns={},
        group_id=0,
        group_size=1,
        group_num_tokens=size,
    )
