"""What a rank holds of a model, and what a forward and backward pass takes beside it, told without
running it.

    configuration of a model ─► the model, its tensors with shapes and no numbers
                                  └─► laid out as ranks do it, of which only this one is there
                                        └─► the trainer's own passes ─► the most bytes held at once

The passes are those that train: roles, logits in chunks, recomputation, FSDP2, stages. Tensors are
torch's fake ones: operations say what they would make, and each of these is counted until it is
freed. The other ranks are torch's fake ones too: collectives give tensors of the right shapes.
"""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # of fake tensors
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations import moe

from rlsys.config import Checkpointing, Precision
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.data.hub import in_short
from rlsys.engines.models.causal_lm import use_engine_layers
from rlsys.engines.models.collate import CollatedBatch
from rlsys.engines.models.fused_elementwise import use_fused_elementwise
from rlsys.engines.models.model_roles import HeadKind, Role, role_of
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.models.rms_norm import use_fast_norms
from rlsys.engines.models.scalar_lm import scalar_class
from rlsys.engines.training.recomputation import checkpoint_layers
from rlsys.engines.training.sharding import allocate, build_mesh, cut
from rlsys.engines.training.supervised import supervised_row
from rlsys.reallocation.shards import TensorShard, holdings, local_part


class LiveBytes(TorchDispatchMode):
    """Counts, within the block, what operations make and what of it is still there. `beside`: of
    these nothing is counted, and of what else was there before the block.
    """

    def __init__(self, beside: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._beside = [_storage(tensor) for tensor in beside]
        self._known: dict[int, Any] = {id(storage): storage for storage in self._beside}
        self._sizes: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Any:
        # FSDP2 empties and fills storages, which are no operations; torch's own MemTracker sees
        # them in the same way.
        counted = self

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            counted._resize(storage, size)
            counted._resized(storage)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(_storage(one)) for one in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = _storage(tensor)
            if id(storage) not in given:
                self._meet(storage)
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        number = id(storage)
        if number not in self._known:
            self._known[number] = weakref.ref(storage, partial(self._freed, number))
            self._count(number, storage.nbytes())

    def _count(self, number: int, num_bytes: int) -> None:
        self.now += num_bytes - self._sizes.get(number, 0)
        self._sizes[number] = num_bytes
        self.peak = max(self.peak, self.now)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._meet(storage)
        if id(storage) in self._sizes:
            self._count(id(storage), storage.nbytes())

    def _freed(self, number: int, _: Any) -> None:
        self.now -= self._sizes.pop(number)
        del self._known[number]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """So many that a rank runs in turn, or a stage has under way."""

    count: int
    num_rows: int  # of each pass
    row_tokens: int


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Of one rank."""

    num_parameters: int
    passes: int | None
    """Most bytes beside its own weights and their gradients: activations, weights that are gathered
    and gradients that are not yet reduced, logits. None: not told."""
    untold: str = ""
    """Why not."""


def fullest_rank(
    config: Any,
    *,
    head: HeadKind,
    dtype: Precision,
    checkpointing: Checkpointing,
    layout: ParallelLayout,
    passes: MicroBatchPlan,
    on_gpu: bool = False,
) -> RankBytes:
    """Return the rank that takes the most memory of a model with this Hugging Face configuration
    and head. All tokens of its rows are trained on but the first; rows have nothing in common.

    What follows from the numbers themselves, as how many tokens a rank sends to experts of others
    does, is `untold`. Raises
    ValueError for an architecture that cannot be trained or laid out so, and in a process that has
    met other ranks.
    """
    found, mode = [], FakeTensorMode(allow_non_fake_inputs=True)
    for stage in sorted({0, layout.pp - 1}):  # those between have neither embedding nor head
        rank = stage * (layout.num_ranks // layout.pp)
        with _alone(rank, layout.num_ranks):
            role = _in_role(copy.deepcopy(config), head, mode, on_gpu=on_gpu)
            role.hidden_dtype = getattr(torch, dtype)
            checkpoint_layers(role.network, checkpointing)
            mesh = build_mesh(layout, rank=rank, dtype=dtype, device="cpu")
            if mesh is not None:
                cut(role.network, mesh, dtype=dtype, device="cpu")
            found.append(_rank_bytes(role, passes, mode))
    return max(found, key=lambda one: 16 * one.num_parameters + (one.passes or 0))


def holdings_of_ranks(
    config: Any, *, head: HeadKind, dtype: Precision, layout: ParallelLayout
) -> list[list[TensorShard]]:
    """What each rank has of a model with this configuration. Raises as fullest_rank does."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def of_rank(rank: int) -> list[TensorShard]:
        with _alone(rank, layout.num_ranks):
            role = _in_role(copy.deepcopy(config), head, mode)
            mesh = build_mesh(layout, rank=rank, dtype=dtype, device="cpu")
            if mesh is not None:
                cut(role.network, mesh, dtype=dtype, device="cpu")
            return holdings(model_tensors(role.network.model))

    # torch keeps what it has once found out of a mesh for equal ones: those of two ranks are, but
    # in two threads.
    with ExitStack() as threads:
        own = (threads.enter_context(ThreadPoolExecutor(1)) for _ in range(layout.num_ranks))
        return [thread.submit(of_rank, rank).result() for rank, thread in enumerate(own)]


@contextmanager
def _alone(rank: int, num_ranks: int) -> Iterator[None]:
    """In a process that is this rank, and has met nobody."""
    if dist.is_initialized():
        raise ValueError("this process is a rank of something else")
    hook = sys.excepthook  # in whose place torch puts one that names the rank in every line
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _in_role(config: Any, head: HeadKind, mode: FakeTensorMode, *, on_gpu: bool = False) -> Role:
    """Return a role with parameters on the meta device, as an engine lays a model out. `on_gpu`:
    one that computes as it does on a GPU.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    with mode:
        if head == "logits":
            model = AutoModelForCausalLM.from_config(config, **options)
        else:
            config.num_labels = 1
            model = scalar_class(config)._from_config(config, **options)
    model.eval()
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty(parameter.shape, device="meta"))
            setattr(module, name, made[parameter])
    if head == "logits":
        use_engine_layers(model)  # which those of other heads do themselves
    use_fast_norms(model, fused=on_gpu)
    if on_gpu:
        use_fused_elementwise(model)
    return role_of(model, head, torch.device("cpu"), temperature=1.0, on_gpu=on_gpu)


class _GroupedProducts(torch.autograd.Function):
    """What torch's product of experts makes, and keeps for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        return tokens.new_empty(len(tokens), weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        tokens, weight = ctx.saved_tensors
        return torch.empty_like(tokens), torch.empty_like(weight), None


@contextmanager
def _any_precision_of_experts() -> Iterator[None]:
    """Torch's product of fake experts knows bfloat16 alone; how many tokens each expert gets makes
    no difference to it.
    """
    known = moe._grouped_mm

    def product(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        if weight.dtype == torch.bfloat16:
            real: torch.Tensor = known(input, weight, offs)
            return real
        made: torch.Tensor = _GroupedProducts.apply(input.to(weight.dtype), weight, offs)
        return made

    moe._grouped_mm = product
    try:
        yield
    finally:
        moe._grouped_mm = known


def _rank_bytes(role: Role, passes: MicroBatchPlan, mode: FakeTensorMode) -> RankBytes:
    model = role.network.model
    with mode:
        allocate(role.network, "cpu")
    parameters = list(model.parameters())
    num_parameters = sum(local_part(one).numel() for one in parameters)
    rows = [supervised_row([k, *[0] * (passes.row_tokens - 1)], 1) for k in range(passes.num_rows)]
    batches = [role.collate(rows) for _ in range(passes.count)]
    for batch in batches:
        if batch.packing is not None:
            _ = batch.packing.calls  # follows from numbers
    with mode:
        for one in parameters:
            one.grad = torch.empty_like(one)
    live = LiveBytes([*parameters, *model.buffers(), *(one.grad for one in parameters)])
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    torchs.disabled = True  # what fails is told here
    try:
        with mode, live, _any_precision_of_experts():
            _train(role, batches)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        untold = f"a pass of {type(model).__name__} cannot be told beforehand"
        untold += f" ({in_short(error)})"
        return RankBytes(num_parameters=num_parameters, passes=None, untold=untold)
    finally:
        torchs.disabled = False
    return RankBytes(num_parameters=num_parameters, passes=live.peak)


def _train(role: Role, batches: list[CollatedBatch]) -> None:
    """Forward and backward, as the engine does it."""

    def forward(number: int, received: torch.Tensor | None) -> torch.Tensor:
        said = role.run(batches[number], received)
        if role.stage is not None and not role.stage.is_last:
            hidden: torch.Tensor = said
            return hidden
        numbers: torch.Tensor = said[0] if isinstance(said, tuple) else said
        return numbers.sum()

    if role.stage is not None:
        role.stage.run(len(batches), forward, lambda number: role.hidden_buffer(batches[number]))
        return
    for number in range(len(batches)):
        forward(number, None).backward()
