"""Training of an EAGLE-3 head along with the policy, on the same passes.

    policy's pass ─► hidden states, detached ─► head ─► KL(policy ‖ head) ─► backward ─┐
    policy's backward: the same as without a head                                      │
    policy's update ─► sum over ranks ─► mean ─► clip ─► AdamW ◄───────────────────────┘

The head has gradients and an optimizer of its own, and its losses are part of no metric of the
policy. Every rank has the whole head, and all have the same.

Shape legend: M inputs of a batch, Q queries (draft_layout.py), D width, V vocabulary, V' tokens
that the head can draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rlsys import metrics
from rlsys.config.speculation import FIELD, Speculation
from rlsys.engines.models.causal_lm import backbone, head_logits
from rlsys.engines.models.collate import CollatedBatch
from rlsys.engines.models.eagle_head import (
    OUTPUT,
    PUBLISHED,
    TOKENS,
    HeadWeights,
    as_parameters,
    drafted_tokens,
)
from rlsys.engines.models.token_policy import IMPOSSIBLE
from rlsys.engines.training.draft_layout import DraftLayout, draft_layout
from rlsys.engines.training.draft_network import DraftNetwork
from rlsys.engines.training.optimizer import MOMENTS, AdamW
from rlsys.engines.training.sharding import named_layers
from rlsys.errors import require

STEP_WEIGHT = 0.8  # of a drafted token, for each drafted token before it: those are checked first
MAX_NORM = 1.0  # of the gradient
BETAS = (0.9, 0.95)
SAVED_AS = "draft"  # folder of the head in an exported model

Sums = torch.Tensor  # [4]: weighted losses, weights, agreeing first tokens, first tokens


class DraftTraining:
    """A head and its optimizer, on each rank of a data-parallel trainer.

    `network` is the policy's, sharded or not. `dtype` is the precision of its passes.
    """

    def __init__(
        self,
        head: HeadWeights,
        speculation: Speculation,
        network: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._head = head
        self._weights = as_parameters(head.tensors, device)
        offsets = head.tensors.get(TOKENS)
        self._offsets = None if offsets is None else offsets.to(device)
        self._drafted = None if self._offsets is None else drafted_tokens(self._offsets)
        self._computed = DraftNetwork(head.sizes, self._weights, device)
        self._num_steps = speculation.num_tokens
        self._network = network
        self._dtype = dtype
        # float16 would need a scale of the loss, so float32 replaces it.
        self._computes_lower = dtype is torch.bfloat16
        self._device = device
        self._optimizer = AdamW(
            self._weights,
            [{"params": list(self._weights.values())}],
            dtype=torch.float32,
            offload=False,
            lr=float(speculation.learning_rate),
            betas=BETAS,
            weight_decay=0.0,
        )
        self._moments = {n: self._optimizer.moments(one) for n, one in self._weights.items()}
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._metrics: dict[str, float] = {}
        self._seen: dict[int, torch.Tensor] = {}  # hidden states of a pass, by number of layers
        self._last: torch.Tensor | None = None  # those that the policy's output layer reads
        self._watches = False
        self._watch_layers()

    @property
    def published(self) -> dict[str, torch.Tensor]:
        """The head by the names of a published version."""
        fixed = {} if self._offsets is None else {TOKENS: self._offsets}
        return {PUBLISHED + name: one for name, one in (self._weights | fixed).items()}

    @property
    def published_dtypes(self) -> dict[str, torch.dtype]:
        """The precision in which each tensor is published."""
        return {
            name: self._dtype if one.is_floating_point() else one.dtype
            for name, one in self.published.items()
        }

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The state in checkpoints, to be changed in place."""
        state = {f"draft.{name}": one.detach() for name, one in self._weights.items()}
        for name, moments in self._moments.items():
            state |= {f"draft.{key}.{name}": moments[key] for key in ("step", *MOMENTS)}
        return state

    @property
    def last_metrics(self) -> dict[str, float]:
        """Metrics of the last update; empty if no token was drafted."""
        return self._metrics

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the hidden states of the policy's pass in this block, for `learn`."""
        self._watches = True
        try:
            yield
        finally:
            self._watches = False

    def learn(self, batch: CollatedBatch) -> None:
        """Add the gradients of a batch, after the policy's forward pass and before its backward."""
        seen, last = self._seen, self._last
        self._seen, self._last = {}, None
        layout = draft_layout(batch)
        if layout is None:
            return
        assert last is not None
        hidden = torch.cat([seen[n].flatten(0, 1) for n in self._head.sizes.layers], -1)
        lower = torch.autocast(self._device.type, torch.bfloat16, enabled=self._computes_lower)
        with torch.enable_grad(), lower:
            tokens = batch.input_ids.flatten()[layout.places]
            embeddings = F.embedding(tokens, self._table("get_input_embeddings")).float()
            inputs = hidden[layout.parents].float()
            drafts = self._computed.drafts(layout, embeddings, inputs, self._num_steps)
            read = last.flatten(0, 1)[layout.places[layout.queries]]
            loss = self._loss(layout, read, drafts)
        loss.backward()

    def update(self) -> None:
        """Update the head from the gradients of all ranks since the last update. A collective.

        Gradients that are not finite are discarded.
        """
        weights = list(self._weights.values())
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
        flat = torch.cat([self._sums.float(), *(one.flatten() for one in gradients)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flat)
        total, weight, agreeing, first = flat[:4].tolist()
        self._metrics = {}
        gradient = flat[4:]
        gradient /= max(weight, 1e-30)
        norm = gradient.norm()
        if weight and bool(norm.isfinite()):
            gradient *= (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
            sizes = [one.numel() for one in weights]
            for one, part in zip(weights, gradient.split(sizes), strict=True):
                one.grad = part.view_as(one)
            self._optimizer.step()
            self._metrics = {
                metrics.DRAFT_LOSS: total / weight,
                metrics.DRAFT_AGREEMENT: agreeing / max(first, 1.0),
            }
        self.reset()

    def reset(self) -> None:
        """Discard gradients and sums."""
        self._optimizer.zero_grad()
        self._sums.zero_()
        self._seen, self._last = {}, None

    def save(self, directory: Path) -> None:
        """Write the head into a folder of an exported model, as vLLM reads it. Raises OSError."""
        trained = {name: one.detach() for name, one in self._weights.items()}
        HeadWeights(self._head.sizes, self._head.tensors | trained).save(
            directory / SAVED_AS, self._dtype
        )

    def _watch_layers(self) -> None:
        """Register hooks that keep what the head reads."""
        model = self._network.model
        layers = named_layers(backbone(model))
        num_layers = model.config.get_text_config().num_hidden_layers
        require(
            len(layers) == num_layers,
            f"{FIELD}.trained_along",
            True,
            rule=f"{type(model).__name__} names {len(layers)} decoder layers, and its config.json "
            f"{num_layers}, so the head's inputs are unknown",
            fix="Leave it out.",
        )

        def before_first(_: Any, inputs: Any, options: Any) -> None:
            self._keep(0, inputs[0] if inputs else options["hidden_states"])

        def after(number: int, _: Any, __: Any, output: Any) -> None:
            self._keep(number, output)

        def after_last(_: Any, __: Any, output: Any) -> None:
            if self._watches:
                self._last = output.last_hidden_state.detach()

        for number in self._head.sizes.layers:
            if number:
                layers[number - 1].register_forward_hook(partial(after, number))
            else:
                layers[0].register_forward_pre_hook(before_first, with_kwargs=True)
        backbone(model).register_forward_hook(after_last)

    def _keep(self, number: int, output: Any) -> None:
        if self._watches:
            hidden = output[0] if isinstance(output, tuple) else output
            self._seen[number] = hidden.detach()

    def _table(self, getter: str) -> torch.Tensor:
        """Return the weight of the policy's embedding or output layer, without gradient."""
        weight: torch.Tensor = getattr(self._network.model, getter)().weight
        assert not isinstance(weight, DTensor), "gathered from the forward to the backward pass"
        return weight.detach()

    def _loss(
        self, layout: DraftLayout, read: torch.Tensor, drafts: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the summed loss of all queries, and add to the sums.

        `read` [Q, D] are the policy's last hidden states, `drafts` [Q, D] the head's in each step.
        """
        valid = [torch.ones_like(layout.before, dtype=torch.bool)]
        for _ in drafts[1:]:
            valid.append(valid[-1][layout.before] & (layout.before >= 0))
        size = max(1, self._network.chunk_tokens // (2 * len(drafts)))
        chunks = zip(
            read.split(size),
            torch.stack(valid, 1).split(size),
            torch.stack(drafts, 1).split(size),
            strict=True,
        )
        is_short = len(read) <= size
        losses = []
        for chunk in chunks:
            if is_short:
                loss, sums = self._loss_of(*chunk)
            else:
                loss, sums = checkpoint(
                    self._loss_of, *chunk, use_reentrant=False, preserve_rng_state=False
                )
            losses.append(loss)
            self._sums += sums
        return torch.stack(losses).sum()

    def _loss_of(
        self, read: torch.Tensor, valid: torch.Tensor, drafts: torch.Tensor
    ) -> tuple[torch.Tensor, Sums]:
        """Return the loss of C queries and its sums; `valid` is [C, steps], drafts [C, steps, D].

        The loss is KL(policy ‖ head) at temperature 1 over the tokens that the head can draft.
        Queries whose likeliest token it cannot draft do not count.
        """
        with torch.no_grad():
            logits = head_logits(self._network.model, read).float()  # [C, V]
            best = logits.argmax(-1)
            if self._drafted is not None:
                valid = valid & torch.isin(best, self._drafted)[:, None]
                logits = logits[:, self._drafted]  # [C, V']
            target = logits.log_softmax(-1).clamp(min=IMPOSSIBLE)
            chance = target.exp()
        output = self._weights.get(OUTPUT)
        weight = self._table("get_output_embeddings") if output is None else output
        if not self._computes_lower:
            weight = weight.float()
        total = read.new_zeros((), dtype=torch.float32)
        sums = torch.zeros(4, device=read.device)
        for step in range(drafts.shape[1]):
            found = F.linear(drafts[:, step], weight).float()
            losses = (chance * (target - found.log_softmax(-1))).sum(-1)
            share = STEP_WEIGHT**step
            counted = valid[:, step]
            total = total + share * losses.masked_fill(~counted, 0.0).sum()
            sums[1] += share * counted.sum()
            if step == 0:
                agrees = found.detach().argmax(-1) == target.argmax(-1)
                sums[2:] = torch.stack(((agrees & counted).sum(), counted.sum()))
        sums[0] = total.detach()
        return total, sums


def draft_training(
    speculation: Speculation | None,
    network: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftTraining | None:
    """Return the training of a head for the policy `network`; None unless it is trained along.

    Raises:
        InvalidValue: The head cannot be trained with this policy.
    """
    if speculation is None or not speculation.trained_along:
        return None
    policy, path = network.model.config, speculation.model
    head = HeadWeights.read(path, policy) if path else HeadWeights.new(policy)
    return DraftTraining(head, speculation, network, dtype=dtype, device=device)


def stored_part(
    tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return a head's state if a checkpoint has all of it, with the sizes in `stored`, else none.

    A head that is new to a resumed run, or another one, begins with its own weights.
    """
    fits = all(stored.get(f"buffer.{name}") == one.shape for name, one in tensors.items())
    return dict(tensors) if fits else {}
