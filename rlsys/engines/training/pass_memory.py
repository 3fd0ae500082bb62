"""What a forward and backward pass takes beside weights and their gradients, without running it.

    configuration of a model ─► the model, its tensors with shapes and no numbers
                                  └─► the trainer's own pass ─► the most bytes held at once

The pass is the one that trains (TokenPolicy, its logits in chunks, recomputation). Its tensors are
torch's fake ones: operations say what they would make, and each of these is counted until it is
freed.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlsys.config import Checkpointing
from rlsys.engines.causal_lm import use_engine_layers
from rlsys.engines.rms_norm import use_fast_norms
from rlsys.engines.training.collate import collate
from rlsys.engines.training.recomputation import checkpoint_layers
from rlsys.engines.training.supervised import supervised_row
from rlsys.engines.training.token_policy import TokenPolicy


class LiveBytes(TorchDispatchMode):
    """Counts, within the block, what operations make and what of it is still there. `beside`: of
    these nothing is counted, and of what else was there before the block."""

    def __init__(self, beside: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._beside = [tensor.untyped_storage() for tensor in beside]
        self._known: dict[int, Any] = {id(storage): storage for storage in self._beside}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(one.untyped_storage()) for one in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            number = id(storage)
            if number not in self._known and number not in given:
                self._add(number, storage.nbytes(), storage)
        return result

    def _add(self, number: int, num_bytes: int, storage: Any) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        self._known[number] = weakref.ref(storage, partial(self._freed, number, num_bytes))

    def _freed(self, number: int, num_bytes: int, _: Any) -> None:
        self.now -= num_bytes
        del self._known[number]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def pass_bytes(
    config: Any, *, dtype: str, checkpointing: Checkpointing, num_rows: int, row_tokens: int
) -> int:
    """Of a policy with this Hugging Face configuration, for rows of so many tokens each, all of
    them trained on but the first.

    Raises ValueError for an architecture that cannot be trained, or whose work depends on the
    numbers themselves, as the routing of experts does.
    """
    from transformers import AutoModelForCausalLM

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
    use_engine_layers(model)
    use_fast_norms(model)
    network = TokenPolicy(model)
    checkpoint_layers(network, checkpointing)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_forget)
    rows = [supervised_row([0] * row_tokens, 1) for _ in range(num_rows)]
    batch = collate(rows, packed=network.packs, shares=False)
    if batch.packing is not None:
        _ = batch.packing.calls  # follows from numbers
    live = LiveBytes([*model.parameters(), *model.buffers()])
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    torchs.disabled = True  # what fails is told here
    try:
        with mode, live:
            network(batch, 1.0)[0].sum().backward()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"the activations of {type(model).__name__} cannot be told beforehand "
            f"({type(error).__name__})"
        ) from error
    finally:
        torchs.disabled = False
    return live.peak


def _forget(parameter: torch.Tensor) -> None:
    parameter.grad = None
