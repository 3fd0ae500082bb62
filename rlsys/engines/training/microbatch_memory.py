"""Estimate of a rank's parameters and peak memory of a forward and backward pass, without data.

    configuration of a model ─► the model, with tensors that have shapes only
                                  └─► sharded for one rank of the layout
                                        └─► the trainer's own passes ─► peak bytes

The passes are those of training: roles, logits in chunks, recomputation, FSDP2, pipeline stages.
Tensors are torch's fake tensors: operations give results with shapes, which are counted until they
are freed. The other ranks are fake too: collectives give tensors of the right shapes.
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
from rlsys.errors import InvalidValue
from rlsys.reallocation.shards import TensorShard, holdings, local_part


class LiveBytes(TorchDispatchMode):
    """Counts the bytes that operations allocate within the block, now and at the peak.

    Tensors that exist before the block, and those of `excluded`, are not counted.
    """

    def __init__(self, excluded: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._excluded = [_storage(tensor) for tensor in excluded]
        self._known: dict[int, Any] = {id(storage): storage for storage in self._excluded}
        self._sizes: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Any:
        # FSDP2 resizes storages, which is not a dispatched operation; torch's MemTracker intercepts
        # it in the same way.
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
        inputs = {id(_storage(one)) for one in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = _storage(tensor)
            if id(storage) not in inputs:
                self._track(storage)
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        number = id(storage)
        if number not in self._known:
            self._known[number] = weakref.ref(storage, partial(self._freed, number))
            self._count(number, storage.nbytes())

    def _count(self, number: int, num_bytes: int) -> None:
        self.now += num_bytes - self._sizes.get(number, 0)
        self._sizes[number] = num_bytes
        self.peak = max(self.peak, self.now)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._track(storage)
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
    """Micro-batches that a rank runs in turn, or that a stage has in flight."""

    count: int
    num_rows: int  # per pass
    row_tokens: int


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Memory of one rank."""

    num_parameters: int
    passes: int | None
    """Peak bytes besides its own weights and their gradients: activations, gathered weights,
    unreduced gradients, logits. None if unknown."""
    unknown_reason: str = ""
    """Why `passes` is unknown."""


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
    """Return the memory of the rank that needs most, for a Hugging Face configuration and head.

    All tokens of a row but the first are trained on; rows share no prefix. `unknown_reason`
    explains a result that depends on the data, such as the number of tokens that go to other ranks'
    experts.

    Raises ValueError for an architecture that cannot be trained in this layout, and in a process
    that belongs to a process group.
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
    """Return the shards of each rank of a model. Raises as fullest_rank does."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def of_rank(rank: int) -> list[TensorShard]:
        with _alone(rank, layout.num_ranks):
            role = _in_role(copy.deepcopy(config), head, mode)
            mesh = build_mesh(layout, rank=rank, dtype=dtype, device="cpu")
            if mesh is not None:
                cut(role.network, mesh, dtype=dtype, device="cpu")
            return holdings(model_tensors(role.network.model))

    # torch caches properties of equal meshes per thread; meshes of two ranks compare equal, so each
    # rank gets its own thread.
    with ExitStack() as threads:
        own = (threads.enter_context(ThreadPoolExecutor(1)) for _ in range(layout.num_ranks))
        return [thread.submit(of_rank, rank).result() for rank, thread in enumerate(own)]


@contextmanager
def _alone(rank: int, num_ranks: int) -> Iterator[None]:
    """Run the block as this rank, with a fake process group."""
    if dist.is_initialized():
        raise InvalidValue(
            "process",
            rule="it already belongs to a process group",
            fix="Estimate memory in another process.",
        )
    hook = sys.excepthook  # torch replaces it by one that prints the rank in every line
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _in_role(config: Any, head: HeadKind, mode: FakeTensorMode, *, on_gpu: bool = False) -> Role:
    """Return a role with parameters on the meta device, as an engine prepares it.

    With `on_gpu`, the model computes as on a GPU.
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
    made: dict[nn.Parameter, nn.Parameter] = {}  # keeps tied parameters tied
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty(parameter.shape, device="meta"))
            setattr(module, name, made[parameter])
    if head == "logits":
        use_engine_layers(model)  # classes of other heads do so themselves
    use_fast_norms(model, fused=on_gpu)
    if on_gpu:
        use_fused_elementwise(model)
    return role_of(model, head, torch.device("cpu"), temperature=1.0, on_gpu=on_gpu)


class _GroupedProducts(torch.autograd.Function):
    """Shapes of torch's grouped matrix product for experts, and of its gradient."""

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
    """Replace torch's product of fake experts, which supports bfloat16 only.

    Its memory does not depend on the number of tokens of each expert.
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
            _ = batch.packing.calls  # needs real numbers
    with mode:
        for one in parameters:
            one.grad = torch.empty_like(one)
    live = LiveBytes([*parameters, *model.buffers(), *(one.grad for one in parameters)])
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    torchs.disabled = True  # the error is returned below
    try:
        with mode, live, _any_precision_of_experts():
            _train(role, batches)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        unknown_reason = (
            f"a pass of {type(model).__name__} needs data to be traced ({in_short(error)})"
        )
        return RankBytes(num_parameters=num_parameters, passes=None, unknown_reason=unknown_reason)
    finally:
        torchs.disabled = False
    return RankBytes(num_parameters=num_parameters, passes=live.peak)


def _train(role: Role, batches: list[CollatedBatch]) -> None:
    """Run forward and backward passes as the engine does."""

    def forward(number: int, received: torch.Tensor | None) -> torch.Tensor:
        output = role.run(batches[number], received)
        if role.stage is not None and not role.stage.is_last:
            hidden: torch.Tensor = output
            return hidden
        numbers: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return numbers.sum()

    if role.stage is not None:
        role.stage.run(len(batches), forward, lambda number: role.hidden_buffer(batches[number]))
        return
    for number in range(len(batches)):
        forward(number, None).backward()
