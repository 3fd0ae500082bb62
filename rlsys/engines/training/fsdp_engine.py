"""The training engine: one rank of a data-parallel trainer over any Hugging Face model.

    rows ─► passes ─► Role: network, loss ─► backward ─┐ (summed, unnormalised)
                                                       ├─► one reduction ─► clip ─► AdamW ─► publish
    denominators, counts, metrics (summed) ────────────┘

FSDP2 shards parameters, gradients and optimizer over the ranks. Sums of all micro-batches and ranks
are reduced and divided once, when the optimizer updates the weights. A batch may take several
updates; policy_version counts batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rlsys import metrics
from rlsys.algorithms.aggregation import Aggregation, token_mean
from rlsys.algorithms.derived_metrics import derived_metrics
from rlsys.algorithms.losses import cross_entropy
from rlsys.common.option_names import option
from rlsys.config import ModelConfig, TrainerConfig
from rlsys.config.speculation import Speculation
from rlsys.data.hub import in_short
from rlsys.engines.devices.cpu import keep_freed_memory
from rlsys.engines.devices.offload import HostMemory, Offloaded, return_freed_memory
from rlsys.engines.inference.frozen_model import infer
from rlsys.engines.models.costs import attention_tokens
from rlsys.engines.models.model_roles import HeadKind, Loss, Policy, load_role
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.models.step_statistics import StepSums, over_updates
from rlsys.engines.training.accumulation import Accumulation, Objective
from rlsys.engines.training.adapters import AdaptedWeight, Adapters, FrozenWeights
from rlsys.engines.training.draft_training import draft_training, stored_part
from rlsys.engines.training.export import export_model
from rlsys.engines.training.gradient_sums import GradientSums
from rlsys.engines.training.loss_scale import LossScale
from rlsys.engines.training.optimizer import (
    build_adamw,
    learning_rate,
    scale_gradients,
    set_learning_rate,
)
from rlsys.engines.training.publisher import Publisher
from rlsys.engines.training.ranks import Ranks, lost_contact
from rlsys.engines.training.recomputation import checkpoint_layers
from rlsys.engines.training.sharding import build_mesh, free_gathered, shard
from rlsys.engines.training.snapshot import SnapshotFile, snapshot_bytes
from rlsys.engines.training.state_resharding import Move, fill
from rlsys.engines.training.supervised import supervised_row
from rlsys.engines.training.trainer_state import (
    HeldState,
    StatePlan,
    load_state,
    plan_state,
    state_tensors,
    stored_sizes,
)
from rlsys.engines.training.weight_loading import read_weights
from rlsys.errors import InvalidValue, require
from rlsys.reallocation.shards import TensorShard, holdings, local_part, whole
from rlsys.reallocation.transport.cuda_ipc import shared_device
from rlsys.reallocation.transport.weight_deltas import WeightDelta
from rlsys.types import Float32Array, MicroBatch, StepResult, TrainRow, WeightManifest


class FSDPEngine:
    """A rank of a trainer: an implementation of `TrainingEngine` with FSDP2.

    Every rank creates its own engine after `init_process_group`; `node` names its node.

    `head` selects the output of the model and the input of the loss: "logits" gives LossInputs,
    "value" ValueInputs, "score" ScoreInputs. A value or score head that the model lacks starts as
    zeros. Only a model with logits is published.

    `frozen` are weights that engines of this process share. It requires adapters and one rank.
    `sends_adapters` publishes the factors of the adapters instead of whole weights. `shares_device`
    publishes in memory of the GPU, for readers on the same node (CUDA IPC).

    `speculation` describes a head that is trained along and published with the policy, if it says
    so. It requires a layout of data parallelism alone.

    Attributes, to be read only:
        policy_version: Number of batches behind the weights.
        parameters: Trained parameters by name, this rank's shards as DTensors; tied ones once.
        base: All tensors of the model by Hugging Face name, without adapters.
        model: The model of transformers, this rank's part of it.
        role: The model with its head, and how it collates rows and computes a loss.
        optimizer: The optimizer of `parameters`; `reset_optimizer` replaces it.
        gradient_sums: Sums of gradients over ranks that FSDP2 does not reduce.
        ranks: Collectives of the trainer's ranks.
        layout: The layout of the trainer.

    Raises OSError if memory does not suffice for a published version of the weights, ValueError for
    a model without this head or one that rlsys does not compute correctly.
    """

    def __init__(
        self,
        *,
        model_path: str | Path,
        trainer: TrainerConfig,
        model: ModelConfig,
        loss: Loss,
        aggregation: Aggregation,
        temperature: float,
        num_total_steps: int,
        seed: int,
        head: HeadKind = "logits",
        rank: int = 0,
        world_size: int = 1,
        device: str = "cpu",
        node: str = "",
        frozen: FrozenWeights | None = None,
        speculation: Speculation | None = None,
        sends_adapters: bool = False,
        shares_device: bool = False,
    ) -> None:
        self.policy_version = 0
        self._updates: list[StepSums] = []  # of the current batch
        self._plan: StatePlan | None = None  # of checkpoints, set by `open_snapshots`
        self._offloaded: Offloaded | None = None  # the state, while it is released
        self._host: HostMemory = {}  # memory that `_offloaded` uses
        self._model_path = model_path
        self._config = trainer
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._num_total_steps = num_total_steps
        self.ranks = Ranks(rank, world_size)
        self.layout = trainer.parallel
        require(
            self.layout.num_ranks == world_size,
            "trainer.layout",
            trainer.layout,
            rule=f"the layout has {self.layout.num_ranks} ranks, but {world_size} have joined",
            fix="Create one engine for each rank of the layout.",
        )
        self._device = torch.device(device)
        torch.manual_seed(seed)
        if self._device.type == "cpu":
            keep_freed_memory()
        # Master weights are float32 at any precision of the forward pass; weights that adapters
        # leave frozen have no masters. The model stays in evaluation mode: dropout would make
        # trainer and sampler two different policies.
        self.role = load_role(
            model_path,
            head=head,
            dtype=model.dtype if model.lora else "float32",
            trained=True,
            temperature=temperature,
            device=self._device,
        )
        self.role.hidden_dtype = self._dtype
        self._objective = Objective(self.role, loss, aggregation)
        network = self.role.network
        require(
            world_size == 1 or not getattr(network, "runs_rows_alone", False),
            "model.path",
            str(model_path),
            rule="the model has no padding token, so transformers runs its rows one by one, which "
            "several ranks cannot do in step",
            fix="Set pad_token_id in its config.json, or use trainer.layout=dp1.",
        )
        self.model = network.model
        self._attention_tokens = attention_tokens(self.model)
        self._adapters: Adapters | None = None
        if model.adapters is not None:
            self._adapters = Adapters(self.model, model.adapters, model_path)
        if frozen is not None:
            assert self._adapters is not None
            assert world_size == 1
            if frozen.tensors:
                frozen.put_into(self.model)
                self.role.unread = {}
        checkpoint_layers(network, model.checkpointing(on_gpu=self._device.type != "cpu"))
        # Frozen weights are in the precision of the pass, and PEFT computes adapters in float32.
        # FSDP2 would take the frozen weights for itself.
        mixed = "float32" if frozen is not None else model.dtype
        self._mesh = build_mesh(self.layout, rank=rank, dtype=mixed, device=device)
        refusal = None
        try:
            shard(network, self._mesh, dtype=model.dtype, device=device)
        except ValueError as error:
            refusal = error
        self.ranks.raise_together(refusal)  # stages have different layers
        self._take_weights(model_path)
        if frozen is not None:
            frozen.tensors = self.base
        self._scale = LossScale(self._dtype)
        self._draft = draft_training(
            speculation if head == "logits" else None,
            network,
            dtype=self._dtype,
            device=self._device,
        )
        self.gradient_sums = GradientSums(self._mesh, self.layout, self.role.stage)
        self._accumulation = Accumulation(
            trainer, self.ranks, self._device, self._scale, self._draft
        )
        self.reset_optimizer()
        published = {name: (self._dtype_of(name), t.shape) for name, t in self._outward.items()}
        self._publisher: Publisher | None = None
        if head == "logits":
            outward, dtypes = self._outward, {name: dtype for name, (dtype, _) in published.items()}
            if sends_adapters:
                assert self._adapters is not None
                outward = self._adapters.factors
                dtypes = dict.fromkeys(outward, self._dtype)
            if self._draft is not None:
                outward = {**outward, **self._draft.published}
                dtypes |= self._draft.published_dtypes
            shared = shared_device(self._device) if shares_device else None
            self._publisher = Publisher(outward, dtypes, self.ranks, node=node, device=shared)
        if self.role.stage is not None:
            published = self.role.stage.gather_facts(published, self._tensors)
        self._published = published
        self._begin_batch()
        if self.layout.size("tp", "cp", "pp", "ep") > 1:
            self._probe()

    def _take_weights(self, model_path: str | Path) -> None:
        """Read this rank's part of the model.

        Sets the tensors that are trained, those that checkpoints keep, and those that leave the
        trainer.
        """
        adapters = self._adapters
        # All tensors of the model by Hugging Face name, without adapters.
        self.base = model_tensors(self.model) if adapters is None else adapters.base
        read_weights(self.base, self.role.unread, model_path, self.ranks)
        self.role.unread = {}
        self.parameters = dict(self.model.named_parameters())  # trained; tied ones occur once
        self._tensors = self.base  # in checkpoints: parameters and persistent buffers
        self._outward: Mapping[str, torch.Tensor | AdaptedWeight] = self.base
        if adapters is not None:
            self.parameters = adapters.trained
            self._tensors = dict(self.parameters)
            self._outward = adapters.merged

    def reset_optimizer(self) -> None:
        """See `TrainingEngine.reset_optimizer`."""
        self.optimizer = build_adamw(self.parameters, self._config)

    def accumulate(self, *micro_batches: MicroBatch) -> None:
        """See `TrainingEngine.accumulate`."""
        self._accumulate(self._objective, [batch.rows for batch in micro_batches])

    def optimizer_step(self, *, last: bool = True) -> StepResult:
        """See `TrainingEngine.optimizer_step`."""
        rate = learning_rate(self._config, self.policy_version, self._num_total_steps)
        number = f", update {len(self._updates) + 1}" if self._updates or not last else ""
        what = f"optimizer step {self.policy_version + 1}{number}"
        self._updates.append(self._apply_gradients(rate, what))
        sums = over_updates(self._updates)
        gaps = {}
        if last:
            self.policy_version += 1
            self._updates = []
            gaps = self._accumulation.gaps.take()
        return StepResult(
            policy_version=self.policy_version,
            metrics={
                metrics.LOSS: sums.loss,
                metrics.GRAD_NORM: sums.grad_norm,
                metrics.LEARNING_RATE: rate,
                metrics.STALENESS_MEAN: sums.staleness_mean,
                metrics.STALENESS_MAX: float(sums.staleness_max),
                **self._scale_metrics(),
                **(self._draft.last_metrics if self._draft is not None else {}),
                **sums.means,
                **derived_metrics(sums.means),
            },
            num_tokens=sums.num_tokens,
            gaps=gaps,
        )

    def sft_step(
        self,
        token_ids: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        learning_rate: float | None = None,
    ) -> float:
        """See `TrainingEngine.sft_step`."""
        if not isinstance(self.role, Policy):
            raise InvalidValue(
                "sft_step",
                rule="a critic or reward model does not predict tokens",
                fix="Warm up the policy instead.",
            )
        if self._updates or not self._accumulation.statistics.is_empty:
            raise InvalidValue(
                "sft_step",
                rule="a call between accumulate and optimizer_step would mix their gradients",
                fix="Call optimizer_step first.",
            )
        examples = list(zip(token_ids, prompt_lengths, strict=True))
        share = examples[self.layout.data_index(self.ranks.rank) :: self.layout.num_data]
        rows = [supervised_row(tokens, length) for tokens, length in share]
        role = Policy(self.role.network, self._device, temperature=1.0)
        role.hidden_dtype = self._dtype
        self._accumulate(Objective(role, cross_entropy(), token_mean), [rows])
        rate = self._config.learning_rate if learning_rate is None else learning_rate
        return self._apply_gradients(rate, "a supervised step").loss

    def infer(self, rows: Sequence[TrainRow], *, adapters: bool = True) -> list[Float32Array]:
        """See `TrainingEngine.infer`."""
        max_tokens, ranks = self._config.micro_batch_tokens, self.ranks
        try:
            with nullcontext() if adapters else self._without_adapters():
                return infer(self.role, rows, max_tokens=max_tokens, ranks=ranks)
        finally:
            free_gathered(self.role.network)

    def _without_adapters(self) -> AbstractContextManager[None]:
        if self._adapters is None:
            raise InvalidValue(
                "model.lora", rule="the model has no adapters to disable", fix="Set model.lora."
            )
        return self._adapters.disabled()

    @property
    def attention_tokens(self) -> float:
        """See `TrainingEngine.attention_tokens`."""
        return self._attention_tokens

    def publish(
        self, nodes: Sequence[str] = (), *, on_device: bool = True
    ) -> WeightManifest | None:
        """See `TrainingEngine.publish`."""
        publisher = self._require_publisher()
        return publisher.publish(self.policy_version, nodes, on_device=on_device)

    def weight_delta(
        self, manifest: WeightManifest, node: str, base: int | None
    ) -> WeightDelta | None:
        """See `TrainingEngine.weight_delta`."""
        return self._require_publisher().weight_delta(manifest, node, base)

    def _require_publisher(self) -> Publisher:
        if self._publisher is None:
            raise InvalidValue(
                "publish",
                rule="a critic or reward model does not sample, so its weights are not published",
                fix="Publish the policy.",
            )
        return self._publisher

    @property
    def holdings(self) -> list[TensorShard]:
        """Shards of the model and its adapters on this rank."""
        return holdings(self.base | self._tensors)

    def _before_change(self) -> None:
        """Move the weights out of memory that a reader still uses, before they change."""
        if self._publisher is not None:
            self._publisher.before_change()

    def _verify(self) -> None:
        """Check the published weights before they are copied or an error is reported to the user.

        Raises DamagedWeightsError.
        """
        if self._publisher is not None:
            self._publisher.verify()

    def load(self, directory: Path) -> None:
        """See `TrainingEngine.load`."""
        self._before_change()
        state = self._tensors | self._scale.tensors
        if self._draft is not None:
            state |= stored_part(self._draft.tensors, stored_sizes(directory))
        self.policy_version = load_state(directory, state, self.optimizer, sharded=self._sharded)
        self._begin_batch()

    def snapshot_bytes(self, num_snapshots: int) -> int:
        """See `TrainingEngine.snapshot_bytes`."""
        return snapshot_bytes(self.local_state(), num_snapshots)

    def open_snapshots(self, path: str, name: str) -> SnapshotFile:
        """See `TrainingEngine.open_snapshots`."""
        state = self.local_state()
        if self._plan is None:
            self._plan = plan_state(state, self.ranks)
        return SnapshotFile(path, name, state)

    def snapshot(self, file: SnapshotFile) -> None:
        """See `TrainingEngine.snapshot`."""
        assert not self._updates, "a version is whole only after the last update of its batch"
        self._verify()
        file.write(self.policy_version, self.local_state())

    def hold(self, file: SnapshotFile) -> HeldState:
        """See `TrainingEngine.hold`."""
        assert self._plan is not None, "open_snapshots made the file, and the plan"
        self.snapshot(file)
        return HeldState(
            plan=self._plan,
            tensors=file.hold(self.policy_version),
            policy_version=self.policy_version,
            release=file.release,
        )

    def restore(self, file: SnapshotFile, step: int) -> None:
        """See `TrainingEngine.restore`."""
        self._before_change()
        state = self.local_state()
        file.read(step, state)
        self._continue_from(step, state)

    def _continue_from(self, step: int, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["rng"])
        self.policy_version = step
        self._begin_batch()

    @property
    def state_holdings(self) -> tuple[TensorShard, ...]:
        """See `TrainingEngine.state_holdings`."""
        return tuple(holdings(self.local_state()))

    def take(self, move: Move, rank: str, weight_deltas: Sequence[WeightDelta]) -> None:
        """See `TrainingEngine.take`."""
        self._before_change()
        state = self.local_state()
        fill(move, rank, state, weight_deltas)
        self._continue_from(move.step, state)

    def release(self) -> None:
        """See `TrainingEngine.release`."""
        assert not self._updates, "a version is whole only after the last update of its batch"
        self._begin_update()
        if self._device.type == "cpu":
            return_freed_memory()
        else:
            self._offloaded = Offloaded(self._on_device(), self._host)

    def take_back(self) -> None:
        """See `TrainingEngine.take_back`."""
        if self._offloaded is not None:
            self._offloaded.take_back()
            self._offloaded = None

    def _on_device(self) -> list[torch.Tensor]:
        """Return the tensors that this rank keeps on its device between steps."""
        moments = [one for state in self.optimizer.state.values() for one in state.values()]
        own = [*self.model.parameters(), *self.model.buffers(), *self._tensors.values(), *moments]
        own += self._draft.tensors.values() if self._draft is not None else ()
        # "cuda" names the current device, whose tensors say "cuda:0".
        return [one for one in map(local_part, own) if one.device.type == self._device.type]

    def export(self, directory: Path) -> None:
        """See `TrainingEngine.export`."""
        self._verify()
        model, adapters = self.model, self._adapters
        extras: list[Callable[[Path], None]] = []
        if adapters is not None:
            trained = {name: whole(tensor) for name, tensor in self._tensors.items()}
            extras.append(partial(adapters.save, trained))
        if self._draft is not None:
            extras.append(self._draft.save)
        # A stage has only some layers, and a model with adapters has other layers.
        if self.role.stage is not None or adapters is not None:
            with torch.device("meta"):
                model = type(model)(model.config)
            for name in ("_weight_conversions", "generation_config"):
                setattr(model, name, getattr(self.model, name, None))
        export_model(
            model,
            self._published,
            self._gather,
            self.ranks,
            dtype=self._dtype,
            tokenizer_path=self._model_path,
            directory=directory,
            extras=extras,
        )

    def _gather(self, name: str) -> torch.Tensor:
        """Return a tensor of the model, whole on rank 0. A collective."""
        own, stage = self._outward.get(name), self.role.stage
        if isinstance(own, AdaptedWeight):
            return own.whole()
        tensor = None if own is None else whole(own)
        if stage is not None:
            return stage.send_to_first(name, tensor)
        assert tensor is not None
        return tensor

    def close(self) -> None:
        """See `TrainingEngine.close`."""
        if self._publisher is not None:
            self._publisher.close()

    def local_state(self) -> dict[str, torch.Tensor]:
        """Return what a snapshot holds: views of this rank's shards, a copy of the RNG state."""
        return state_tensors(self._state, self.optimizer) | {"rng": torch.get_rng_state()}

    @property
    def _state(self) -> dict[str, torch.Tensor]:
        """Tensors that a step changes, without those of the optimizer."""
        draft = {} if self._draft is None else self._draft.tensors
        return self._tensors | self._scale.tensors | draft

    def _scale_metrics(self) -> dict[str, float]:
        if not self._scale.adapts:
            return {}
        return {
            metrics.LOSS_SCALE: self._scale.value,
            metrics.UPDATES_REPEATED: float(self._scale.num_lowered),
        }

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the precision in which a tensor leaves the trainer.

        Parameters leave in the precision of the forward pass, buffers in their own.
        """
        tensor = self._outward[name]
        if isinstance(tensor, torch.nn.Parameter | AdaptedWeight):
            return self._dtype
        return tensor.dtype

    def _probe(self) -> None:
        """Run a pass of a few tokens, to find operations that break the layout before a step."""
        row = supervised_row([0] * 4, 1)
        try:
            self.infer([row])
        except (RuntimeError, TypeError, IndexError, KeyError, AttributeError) as error:
            if lost_contact(error):
                raise
            raise InvalidValue(
                "trainer.layout",
                self._config.layout,
                rule=f"{type(self.model).__name__} does not run in this layout ({in_short(error)})",
                fix="Use a layout of dp alone.",
            ) from error

    @property
    def _sharded(self) -> bool:
        return self.ranks.world_size > 1

    @property
    def _num_updates(self) -> int:
        """Number of updates behind the weights, at `updates_per_step` for each version."""
        return self._config.updates_per_step * self.policy_version + len(self._updates)

    def _begin_batch(self) -> None:
        self._updates = []
        self._accumulation.begin_batch()
        self._begin_update()

    def _begin_update(self) -> None:
        self._accumulation.begin_update()
        self.optimizer.zero_grad()
        if self._draft is not None:
            self._draft.reset()
        free_gathered(self.role.network)  # a failed pass leaves gathered weights

    def _accumulate(
        self, objective: Objective, micro_batches: Sequence[Sequence[TrainRow]]
    ) -> None:
        self._accumulation.add(
            objective,
            micro_batches,
            policy_version=self.policy_version,
            num_updates=self._num_updates,
        )

    def _repeat(self) -> None:
        """Compute the gradients of this update again."""
        accumulated = self._accumulation.accumulated
        self._begin_update()
        for objective, micro_batches in accumulated:
            self._accumulate(objective, micro_batches)

    def _apply_gradients(self, rate: float, what: str) -> StepSums:
        """Normalise, clip and update, then begin the next update.

        The weights change only if loss and gradient are finite. Rows without any trained token
        leave weights and optimizer state unchanged.
        """
        parameters = list(self.parameters.values())
        sums = self._reduced(parameters)
        while _overflowed(sums) and self._scale.lower():
            self._repeat()
            sums = self._reduced(parameters)
        if not (np.isfinite(sums.loss) and np.isfinite(sums.grad_norm)):
            self._begin_batch()
            self._verify()  # damaged weights are not a mistake of the user
            raise FloatingPointError(
                f"{what}: loss {sums.loss} and gradient norm {sums.grad_norm} are not finite. Look "
                "for infinite advantages or sampler_logprobs, or lower trainer.learning_rate in a "
                "new run. It can start from this run's newest checkpoint, of step N (model.path): "
                f"{option('resume', True)} with num_steps=N exports it to hf/." + self._range_hint
            )
        if sums.num_rows and not sums.num_places:  # episodes without tokens of the policy
            self._begin_update()
            return sums
        if sums.denominator <= 0:
            self._begin_batch()
            raise InvalidValue(
                "loss_mask",
                rule=f"{what} has no trained token on any rank",
                fix="Accumulate rows whose loss_mask selects tokens.",
            )
        clip = min(1.0, self._config.max_grad_norm / (sums.grad_norm + 1e-6))
        scale_gradients(parameters, clip / (sums.denominator * self._scale.value))
        set_learning_rate(self.optimizer, rate)
        self._before_change()
        self.optimizer.step()
        if self._draft is not None:
            self._draft.update()
        self._scale.updated()
        self._begin_update()
        return sums

    def _reduced(self, parameters: Sequence[torch.nn.Parameter]) -> StepSums:
        """Return the sums of all ranks since the last update. A collective."""
        self.gradient_sums.add_up(parameters)
        squares = self.gradient_sums.squared_norm(parameters) / self._scale.value**2
        return self._accumulation.statistics.reduce(self.ranks, squares)

    @property
    def _range_hint(self) -> str:
        if self._dtype is not torch.float16:
            return ""
        return " float16 ends at 65,504; model.dtype=bfloat16 has the range of float32."


def _overflowed(sums: StepSums) -> bool:
    """Return whether the gradients alone exceed the range of numbers."""
    return bool(np.isfinite(sums.loss) and not np.isfinite(sums.grad_norm))
