"""Hooks on the routers of a vLLM model on the CPU, which record the experts of every token.

    router of each layer ─► set_capture_fn ─► experts of the step ─► ExpertRows

vLLM's own `enable_return_routed_experts` needs model runner 2, which does not run on the CPU.

Imports vllm: only vLLM's own processes import this module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rlsys.engines.generation.vllm.vllm_expert_rows import ExpertRows, ScheduledTokens, SlotArray
from rlsys.engines.generation.vllm.vllm_requests import REQUEST_ID
from rlsys.engines.models.expert_layout import LEAVE_OUT, REPLAY, Routing
from rlsys.errors import require
from rlsys.types import ExpertArray


def moe_layers(model: torch.nn.Module) -> list[Any]:
    """Return vLLM's layers of experts, in layer order."""
    return [module for module in model.modules() if isinstance(module, MoERunner)]


def check_routers(model: torch.nn.Module, routing: Routing) -> None:
    """Raise InvalidValue unless vLLM's model routes as the Hugging Face model does."""
    routers: list[Any] = [layer.router for layer in moe_layers(model)]
    unknown = {type(one).__name__ for one in routers if not hasattr(one, "set_capture_fn")}
    require(not unknown, REPLAY, rule=f"vLLM's router {unknown} is not known", fix=LEAVE_OUT)
    found = (
        len(routers),
        {router.top_k for router in routers},
        {router.global_num_experts for router in routers},
    )
    expected = (routing.num_layers, {routing.num_chosen}, {routing.num_experts})
    require(
        found == expected,
        REPLAY,
        rule=f"vLLM's model has {found} layers, chosen experts and experts, the Hugging Face model "
        f"{expected}",
        fix=LEAVE_OUT,
    )


class RouterHooks:
    """Records the experts of each step of a model runner of version 1.

    Raises InvalidValue for a model whose cache has no group with a slot for every token.
    """

    def __init__(self, runner: Any, model: torch.nn.Module, routing: Routing) -> None:
        groups = runner.kv_cache_config.kv_cache_groups
        full = [
            n for n, one in enumerate(groups) if isinstance(one.kv_cache_spec, FullAttentionSpec)
        ]
        require(
            bool(full) and runner.vllm_config.kv_transfer_config is None,
            REPLAY,
            rule="vLLM must keep all tokens of a request in its own cache, and this model has no "
            "layer with full attention, or a KV connector moves its cache",
            fix='Use rollout.engine="torch", or leave out replay_routing or the connector.',
        )
        self._runner = runner
        self._routing = routing
        # Of the current step, by layer. A kernel may route the tokens in several pieces.
        self._chosen: dict[int, list[ExpertArray]] = {}
        self._group = full[0]
        block_size = groups[self._group].kv_cache_spec.block_size
        num_slots = runner.kv_cache_config.num_blocks * block_size
        self.rows = ExpertRows(num_slots, routing.width, routing.dtype)
        for number, layer in enumerate(moe_layers(model)):
            layer.router.set_capture_fn(partial(self._capture, number))
        self._records = True  # requests, besides the table of slots
        self._execute = runner.execute_model
        runner.execute_model = self._execute_model

    def forget_requests(self, *, records: bool) -> None:
        """Forget the rows of all requests, and record those of later ones or not."""
        self.rows.forget_all()
        self._records = records

    def _capture(self, layer: int, chosen: torch.Tensor) -> None:
        pieces = self._chosen.setdefault(layer, [])
        pieces.append(chosen.numpy().astype(self._routing.dtype))

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._chosen.clear()
        output = self._execute(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            scheduled = self._scheduled(scheduler_output.num_scheduled_tokens)
            experts = [
                np.concatenate(self._chosen[layer]) for layer in range(self._routing.num_layers)
            ]
            num_tokens = scheduler_output.total_num_scheduled_tokens  # padding may follow
            self.rows.record(scheduled, np.concatenate(experts, 1)[:num_tokens])
        return output

    def _scheduled(self, num_scheduled: dict[str, int]) -> list[ScheduledTokens]:
        """Return the tokens of this step in the order of the batch."""
        batch = self._runner.input_batch
        found = []
        for place, name in enumerate(batch.req_ids):
            start = int(batch.num_computed_tokens_cpu[place])
            extra = self._runner.requests[name].sampling_params.extra_args or {}
            found.append(
                ScheduledTokens(
                    request_id=extra.get(REQUEST_ID) if self._records else None,
                    start=start,
                    end=start + num_scheduled[name],
                    num_known=int(batch.num_tokens_no_spec[place]),
                    slots=partial(self._slots, place),
                )
            )
        return found

    def _slots(self, place: int, start: int, end: int) -> SlotArray:
        table = self._runner.input_batch.block_table[self._group]
        positions = np.arange(start, end)
        blocks = table.block_table.np[place, positions // table.block_size].astype(np.int64)
        slots: SlotArray = blocks * table.block_size + positions % table.block_size
        return slots
