"""The training engine: one rank of a data-parallel trainer over any Hugging Face model.

    rows ─► passes ─► Role: network, loss ─► backward ─┐ (summed, unnormalised)
                                                       ├─► one reduction ─► clip ─► AdamW ─► publish
    denominators, counts, metrics (summed) ────────────┘

FSDP2 shards parameters, gradients and optimizer over the ranks. Nothing is divided before the
optimizer updates the weights, where one reduction brings the sums of all micro-batches and ranks
together. A batch may take several updates; the version counts batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rlsys import metrics
from rlsys.algorithms.aggregation import Aggregation, token_mean
from rlsys.algorithms.derived_metrics import derived_metrics
from rlsys.algorithms.loss_inputs import whole_groups
from rlsys.algorithms.losses import cross_entropy
from rlsys.common.option_names import option
from rlsys.config import ModelConfig, TrainerConfig
from rlsys.data.hub import in_short
from rlsys.engines.devices.cpu import Pieces, keep_freed_memory
from rlsys.engines.devices.offload import HostMemory, Offloaded, return_freed_memory
from rlsys.engines.inference.frozen_model import infer
from rlsys.engines.models.branches import check_trained
from rlsys.engines.models.collate import CollatedBatch, split_passes
from rlsys.engines.models.costs import attention_tokens
from rlsys.engines.models.loss_calls import call_aggregation
from rlsys.engines.models.model_roles import HeadKind, Loss, Policy, Role, load_role
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.models.step_statistics import StepStatistics, StepSums, over_updates
from rlsys.engines.training.adapters import AdaptedWeight, Adapters
from rlsys.engines.training.export import export_model
from rlsys.engines.training.loss_scale import LossScale
from rlsys.engines.training.optimizer import (
    build_adamw,
    learning_rate,
    scale_gradients,
    set_learning_rate,
    squared_norm,
)
from rlsys.engines.training.parallel.pipeline import PipelineStage
from rlsys.engines.training.parallel.tensor_parallel import is_cut, sum_replicated
from rlsys.engines.training.publisher import Publisher
from rlsys.engines.training.ranks import Ranks, lost_contact
from rlsys.engines.training.recomputation import checkpoint_layers
from rlsys.engines.training.sharding import build_mesh, let_go, shard
from rlsys.engines.training.snapshot import SnapshotFile, snapshot_bytes
from rlsys.engines.training.state_resharding import Move, fill
from rlsys.engines.training.supervised import supervised_row
from rlsys.engines.training.trainer_state import (
    HeldState,
    StatePlan,
    load_state,
    plan_state,
    state_tensors,
)
from rlsys.engines.training.weight_loading import read_weights
from rlsys.reallocation.shards import TensorShard, holdings, local_part, whole
from rlsys.reallocation.transport.weight_deltas import WeightDelta
from rlsys.types import Float32Array, MicroBatch, StepResult, TrainRow, WeightManifest


class FSDPEngine:
    """A rlsys.engines.training.training_protocol.TrainingEngine.

    With several ranks every one of them makes its own, after `init_process_group`; `node` names
    where it lies. Raises OSError where memory is short for a version of the weights beside it;
    ValueError for a model that has no such head, or that rlsys gets wrong.

    `head`: what the model gives, and so what the loss gets: "logits" LossInputs, "value"
    ValueInputs, "score" ScoreInputs. A value or score head begins as zeros where the model has
    none. Only the first kind is published.
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
    ) -> None:
        self.policy_version = 0
        self._updates: list[StepSums] = []  # of the batch, so far
        self._plan: StatePlan | None = None  # of checkpoints; from `open_snapshots` on
        self._offloaded: Offloaded | None = None  # the state, while it is released
        self._host: HostMemory = {}  # where it is then
        self._model_path = model_path
        self._config = trainer
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._loss = loss
        self._aggregation = aggregation
        self._num_total_steps = num_total_steps
        self._ranks = Ranks(rank, world_size)
        self._layout = trainer.parallel
        if self._layout.num_ranks != world_size:
            raise ValueError(
                f"trainer.layout={trainer.layout!r} has {self._layout.num_ranks} ranks, but "
                f"{world_size} have met; make one engine for each rank of the layout."
            )
        self._device = torch.device(device)
        self._pieces = Pieces()
        torch.manual_seed(seed)
        if self._device.type == "cpu":
            keep_freed_memory()
        # Masters are float32 whatever the precision of the forward pass; what is frozen beside
        # adapters has none. The model stays in evaluation mode: dropout would make trainer and
        # sampler two different policies.
        self._role = load_role(
            model_path,
            head=head,
            dtype=model.dtype if model.lora else "float32",
            trained=True,
            temperature=temperature,
            device=self._device,
        )
        self._role.hidden_dtype = self._dtype
        network = self._role.network
        if world_size > 1 and getattr(network, "runs_rows_alone", False):
            raise ValueError(
                f"model.path={str(model_path)!r} has no padding token, so transformers runs its "
                "rows one by one, which several ranks cannot do in step; set pad_token_id in its "
                "config.json, or trainer.layout=dp1."
            )
        self._model = network.model
        self._attention_tokens = attention_tokens(self._model)
        self._adapters: Adapters | None = None
        if model.adapters is not None:
            self._adapters = Adapters(self._model, model.adapters, model_path)
        checkpoint_layers(network, model.checkpointing(on_gpu=self._device.type != "cpu"))
        self._mesh = build_mesh(self._layout, rank=rank, dtype=model.dtype, device=device)
        refusal = None
        try:
            shard(network, self._mesh, dtype=model.dtype, device=device)
        except ValueError as error:
            refusal = error
        self._ranks.raise_together(refusal)  # stages have different layers
        self._take_weights(model_path)
        self._scale = LossScale(self._dtype)
        self.reset_optimizer()
        published = {name: (self._dtype_of(name), t.shape) for name, t in self._outward.items()}
        self._publisher: Publisher | None = None
        if head == "logits":
            dtypes = {name: dtype for name, (dtype, _) in published.items()}
            self._publisher = Publisher(self._outward, dtypes, self._ranks, node=node)
        if self._role.stage is not None:
            published = self._role.stage.of_all(published, self._tensors)
        self._published = published
        self._begin_batch()
        if self._layout.size("tp", "cp", "pp", "ep") > 1:
            self._try_out()

    def _take_weights(self, model_path: str | Path) -> None:
        """Read this rank's part of the model, and tell apart what of it is trained, what is kept in
        checkpoints, and what others get.
        """
        adapters = self._adapters
        # All of the model by Hugging Face name, as it is without adapters.
        self._base = model_tensors(self._model) if adapters is None else adapters.base
        read_weights(self._base, self._role.unread, model_path, self._ranks)
        self._role.unread = {}
        self._parameters = dict(self._model.named_parameters())  # trained; tied ones stand once
        self._tensors = self._base  # kept in checkpoints: these and the persistent buffers
        self._outward: Mapping[str, torch.Tensor | AdaptedWeight] = self._base
        if adapters is not None:
            self._parameters = adapters.trained
            self._tensors = dict(self._parameters)
            self._outward = adapters.merged

    def reset_optimizer(self) -> None:
        self._optimizer = build_adamw(list(self._parameters.values()), self._config)

    def accumulate(self, *micro_batches: MicroBatch) -> None:
        self._accumulate(
            self._role, [batch.rows for batch in micro_batches], self._loss, self._aggregation
        )

    def optimizer_step(self, *, last: bool = True) -> StepResult:
        rate = learning_rate(self._config, self.policy_version, self._num_total_steps)
        number = f", update {len(self._updates) + 1}" if self._updates or not last else ""
        what = f"optimizer step {self.policy_version + 1}{number}"
        self._updates.append(self._apply_gradients(rate, what))
        sums = over_updates(self._updates)
        if last:
            self.policy_version += 1
            self._updates = []
        return StepResult(
            policy_version=self.policy_version,
            metrics={
                metrics.LOSS: sums.loss,
                metrics.GRAD_NORM: sums.grad_norm,
                metrics.LEARNING_RATE: rate,
                metrics.STALENESS_MEAN: sums.staleness_mean,
                metrics.STALENESS_MAX: float(sums.staleness_max),
                **self._scale_metrics(),
                **sums.means,
                **derived_metrics(sums.means),
            },
            num_tokens=sums.num_tokens,
        )

    def sft_step(
        self,
        token_ids: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        learning_rate: float | None = None,
    ) -> float:
        if not isinstance(self._role, Policy):
            raise ValueError(
                "sft_step teaches a model its next tokens, which a critic or reward model does not "
                "give; warm the policy up."
            )
        if self._updates or not self._statistics.is_empty:
            raise ValueError(
                "sft_step between accumulate and optimizer_step would mix their gradients; call "
                "optimizer_step first."
            )
        examples = list(zip(token_ids, prompt_lengths, strict=True))
        share = examples[self._layout.data_index(self._ranks.rank) :: self._layout.num_data]
        rows = [supervised_row(tokens, length) for tokens, length in share]
        role = Policy(self._role.network, self._device, temperature=1.0)
        role.hidden_dtype = self._dtype
        self._accumulate(role, [rows], cross_entropy(), token_mean)
        rate = self._config.learning_rate if learning_rate is None else learning_rate
        return self._apply_gradients(rate, "a supervised step").loss

    def infer(self, rows: Sequence[TrainRow], *, adapters: bool = True) -> list[Float32Array]:
        max_tokens, ranks = self._config.micro_batch_tokens, self._ranks
        try:
            with nullcontext() if adapters else self._without_adapters():
                return infer(self._role, rows, max_tokens=max_tokens, ranks=ranks)
        finally:
            let_go(self._role.network)

    def _without_adapters(self) -> AbstractContextManager[None]:
        if self._adapters is None:
            raise ValueError("the model has no adapters to be left out; set model.lora.")
        return self._adapters.left_out()

    @property
    def attention_tokens(self) -> float:
        return self._attention_tokens

    def publish(self, nodes: Sequence[str] = ()) -> WeightManifest | None:
        return self._require_publisher().publish(self.policy_version, nodes)

    def weight_delta(
        self, manifest: WeightManifest, node: str, base: int | None
    ) -> WeightDelta | None:
        return self._require_publisher().weight_delta(manifest, node, base)

    def _require_publisher(self) -> Publisher:
        if self._publisher is None:
            raise ValueError("a critic or reward model samples nothing, so it is not published.")
        return self._publisher

    @property
    def holdings(self) -> list[TensorShard]:
        """What this rank has of the model and its adapters."""
        return holdings(self._base | self._tensors)

    def _before_change(self) -> None:
        """Weights lie where engines may compute with them."""
        if self._publisher is not None:
            self._publisher.before_change()

    def _verify(self) -> None:
        """Before weights go elsewhere, from which the trainer may have to start again, and before a
        user is told that numbers are wrong. Raises DamagedWeightsError.
        """
        if self._publisher is not None:
            self._publisher.verify()

    def load(self, directory: Path) -> None:
        self._before_change()
        self.policy_version = load_state(
            directory, self._state, self._optimizer, sharded=self._sharded
        )
        self._begin_batch()

    def snapshot_bytes(self, num_snapshots: int) -> int:
        return snapshot_bytes(self._local_state(), num_snapshots)

    def open_snapshots(self, path: str, name: str) -> SnapshotFile:
        state = self._local_state()
        if self._plan is None:
            self._plan = plan_state(state, self._ranks)
        return SnapshotFile(path, name, state)

    def snapshot(self, file: SnapshotFile) -> None:
        assert not self._updates, "a version is whole only after the last update of its batch"
        self._verify()
        file.write(self.policy_version, self._local_state())

    def hold(self, file: SnapshotFile) -> HeldState:
        assert self._plan is not None, "open_snapshots made the file, and the plan"
        self.snapshot(file)
        return HeldState(
            plan=self._plan,
            tensors=file.hold(self.policy_version),
            policy_version=self.policy_version,
            let_go=file.let_go,
        )

    def restore(self, file: SnapshotFile, step: int) -> None:
        self._before_change()
        state = self._local_state()
        file.read(step, state)
        self._go_on_from(step, state)

    def _go_on_from(self, step: int, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["rng"])
        self.policy_version = step
        self._begin_batch()

    @property
    def state_holdings(self) -> tuple[TensorShard, ...]:
        return tuple(holdings(self._local_state()))

    def take(self, move: Move, rank: str, weight_deltas: Sequence[WeightDelta]) -> None:
        self._before_change()
        state = self._local_state()
        fill(move, rank, state, weight_deltas)
        self._go_on_from(move.step, state)

    def release(self) -> None:
        assert not self._updates, "a version is whole only after the last update of its batch"
        self._begin_update()
        if self._device.type == "cpu":
            return_freed_memory()
        else:
            self._offloaded = Offloaded(self._on_device(), self._host)

    def take_back(self) -> None:
        if self._offloaded is not None:
            self._offloaded.take_back()
            self._offloaded = None

    def _on_device(self) -> list[torch.Tensor]:
        """Return the tensors that this rank keeps on its device from step to step."""
        moments = [one for state in self._optimizer.state.values() for one in state.values()]
        own = [*self._model.parameters(), *self._model.buffers(), *self._tensors.values(), *moments]
        # "cuda" names the current device, whose tensors say "cuda:0".
        return [one for one in map(local_part, own) if one.device.type == self._device.type]

    def export(self, directory: Path) -> None:
        self._verify()
        model, adapters, save_beside = self._model, self._adapters, None
        if adapters is not None:
            trained = {name: whole(tensor) for name, tensor in self._tensors.items()}
            save_beside = partial(adapters.save, trained)
        # Of a stage this rank has only some layers, of adapted layers others.
        if self._role.stage is not None or adapters is not None:
            with torch.device("meta"):
                model = type(model)(model.config)
            for name in ("_weight_conversions", "generation_config"):
                setattr(model, name, getattr(self._model, name, None))
        export_model(
            model,
            self._published,
            self._gather,
            self._ranks,
            dtype=self._dtype,
            tokenizer_path=self._model_path,
            directory=directory,
            save_beside=save_beside,
        )

    def _gather(self, name: str) -> torch.Tensor:
        """A tensor of the model, whole on rank 0. A collective."""
        own, stage = self._outward.get(name), self._role.stage
        if isinstance(own, AdaptedWeight):
            return own.whole()
        tensor = None if own is None else whole(own)
        if stage is not None:
            return stage.to_first(name, tensor)
        assert tensor is not None
        return tensor

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _local_state(self) -> dict[str, torch.Tensor]:
        """All that a snapshot holds; views of this rank's shards, and a copy of the RNG's state."""
        return state_tensors(self._state, self._optimizer) | {"rng": torch.get_rng_state()}

    @property
    def _state(self) -> dict[str, torch.Tensor]:
        """What a step changes, but for the optimizer's own."""
        return self._tensors | self._scale.tensors

    def _scale_metrics(self) -> dict[str, float]:
        if not self._scale.adapts:
            return {}
        return {
            metrics.LOSS_SCALE: self._scale.value,
            metrics.UPDATES_REPEATED: float(self._scale.num_lowered),
        }

    def _dtype_of(self, name: str) -> torch.dtype:
        """In which a tensor leaves the trainer: a parameter as the forward pass computes with it, a
        buffer, which no precision is set for, as it is.
        """
        tensor = self._outward[name]
        if isinstance(tensor, torch.nn.Parameter | AdaptedWeight):
            return self._dtype
        return tensor.dtype

    def _try_out(self) -> None:
        """A pass of a few tokens: what a model does beyond its plan shows here, not in a step."""
        row = supervised_row([0] * 4, 1)
        try:
            self.infer([row])
        except (RuntimeError, TypeError, IndexError, KeyError, AttributeError) as error:
            if lost_contact(error):
                raise
            raise ValueError(
                f"trainer.layout={self._config.layout!r}: {type(self._model).__name__} cannot be "
                f"laid out so ({in_short(error)}); use a layout of dp alone."
            ) from error

    @property
    def _sharded(self) -> bool:
        return self._ranks.world_size > 1

    @property
    def _num_updates(self) -> int:
        """Behind the weights, as the configuration plans them for each version."""
        return self._config.updates_per_step * self.policy_version + len(self._updates)

    def _begin_batch(self) -> None:
        self._updates = []
        self._begin_update()

    def _begin_update(self) -> None:
        self._statistics = StepStatistics(counts=self._layout.counts(self._ranks.rank))
        self._accumulated: list[tuple[Role, Sequence[Sequence[TrainRow]], Loss, Aggregation]] = []
        self._optimizer.zero_grad()
        let_go(self._role.network)  # of what a pass that failed has gathered

    def _accumulate(
        self,
        role: Role,
        micro_batches: Sequence[Sequence[TrainRow]],
        loss: Loss,
        aggregation: Aggregation,
    ) -> None:
        columns = role.columns(loss, [row for rows in micro_batches for row in rows])
        passes = [
            one for rows in micro_batches for one in self._passes(role, rows, loss, aggregation)
        ]
        # FSDP2 gathers and reduces in every pass, so all ranks run equally many.
        num_passes = self._ranks.max(len(passes))

        def batch_of(number: int) -> tuple[CollatedBatch, torch.Tensor]:
            chosen = passes[number] if number < len(passes) else []
            batch = role.collate([row for row, _ in chosen], columns)
            weights = torch.tensor([weight for _, weight in chosen])
            return batch, weights.to(self._device)[batch.row_index]

        if role.stage is not None:
            self._pipeline(role, role.stage, [batch_of(i) for i in range(num_passes)], loss)
        else:
            for number in range(num_passes):
                total = self._loss_of(role, *batch_of(number), loss)
                self._pieces.release()
                total.backward()
        if self._scale.adapts:
            self._accumulated.append((role, micro_batches, loss, aggregation))

    def _repeat(self) -> None:
        """Compute the gradients of this update again."""
        accumulated = self._accumulated
        self._begin_update()
        for one in accumulated:
            self._accumulate(*one)

    def _passes(
        self, role: Role, rows: Sequence[TrainRow], loss: Loss, aggregation: Aggregation
    ) -> Iterator[list[tuple[TrainRow, float]]]:
        """The rows of a micro-batch that are trained on, with the weight of each of their places,
        in passes that fit. Adds them to the sums.
        """
        role.check_groups(loss, rows)
        for row in rows:
            check_trained(row)
        weighted = [(row, self._count(role, row, aggregation)) for row in rows]
        trained = [(row, weight) for row, weight in weighted if role.num_trained(row)]
        for chosen in split_passes(
            [row for row, _ in trained],
            self._config.micro_batch_tokens,
            packed=role.packs,
            shares=role.shares,
            whole_groups=whole_groups(loss),
        ):
            yield [trained[index] for index in chosen]

    def _pipeline(
        self,
        role: Role,
        stage: PipelineStage,
        batches: Sequence[tuple[CollatedBatch, torch.Tensor]],
        loss: Loss,
    ) -> None:
        def forward(number: int, received: torch.Tensor | None) -> torch.Tensor:
            if stage.is_last:
                return self._loss_of(role, *batches[number], loss, received)
            hidden: torch.Tensor = role.run(batches[number][0], received)
            return hidden

        stage.run(len(batches), forward, lambda i: role.hidden_buffer(batches[i][0]))

    def _count(self, role: Role, row: TrainRow, aggregation: Aggregation) -> float:
        """Add a rollout to the sums; returns the weight of each of its places."""
        num_places = role.num_trained(row)
        sizes = (row.group_size, role.num_in_group(row), num_places)
        weight, denominator = call_aggregation(aggregation, *sizes)
        versions = row.policy_versions[row.loss_mask]
        oldest = int(versions.min(initial=self.policy_version))
        self._statistics.add_rollout(
            denominator=denominator,
            num_places=num_places,
            num_tokens=len(versions),
            staleness=self._num_updates - self._config.updates_per_step * oldest,
        )
        return weight

    def _loss_of(
        self,
        role: Role,
        batch: CollatedBatch,
        weights: torch.Tensor,
        loss: Loss,
        received: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of a pass, summed and scaled: [], with gradient."""
        staleness = self._num_updates - self._config.updates_per_step * batch.policy_versions
        losses, told = role.learn(loss, batch, staleness, received)
        total = (weights * losses).sum()
        self._statistics.add_pass(total, told)
        return total * self._scale.value

    def _add_up(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The gradients of which several ranks have parts, once an update. A collective."""
        if self._mesh is not None and self._layout.tp > 1:
            sum_replicated(parameters, self._mesh)
        if self._role.stage is not None:
            self._role.stage.add_tied()

    def _squared_norm(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """This rank's part of it: what several ranks hold counts once."""
        if self._mesh is None or self._layout.size("tp", "pp", "dp_replicate") == 1:
            return squared_norm(parameters)
        stage = self._role.stage
        if stage is not None and stage.number:
            tied = stage.tied_weight()
            parameters = [one for one in parameters if one is not tied]
        cut = squared_norm([one for one in parameters if is_cut(one)])
        whole = squared_norm([one for one in parameters if not is_cut(one)])
        return (cut + whole / self._layout.tp) / self._layout.dp_replicate

    def _apply_gradients(self, rate: float, what: str) -> StepSums:
        """Normalise, clip and update, then begin the next update.

        The weights change only if all is finite. Rows without a single trained token leave weights
        and optimizer state as they are.
        """
        parameters = list(self._parameters.values())
        sums = self._reduced(parameters)
        while _overflowed(sums) and self._scale.lower():
            self._repeat()
            sums = self._reduced(parameters)
        if not (np.isfinite(sums.loss) and np.isfinite(sums.grad_norm)):
            self._begin_batch()
            self._verify()  # else it is the user's
            raise FloatingPointError(
                f"loss {sums.loss} and gradient norm {sums.grad_norm} at {what}: not a number that "
                "can be trained on; look for infinite advantages or sampler_logprobs, or lower "
                "trainer.learning_rate in a new run. That may begin with this one's newest "
                f"checkpoint, of step N (model.path): {option('resume', True)} with num_steps=N "
                "exports it to hf/." + self._range_hint
            )
        if sums.num_rows and not sums.num_places:  # episodes in which the policy said nothing
            self._begin_update()
            return sums
        if sums.denominator <= 0:
            self._begin_batch()
            raise ValueError(
                f"{what} has no trained token on any rank; accumulate rows with loss_mask tokens."
            )
        clip = min(1.0, self._config.max_grad_norm / (sums.grad_norm + 1e-6))
        scale_gradients(parameters, clip / (sums.denominator * self._scale.value))
        set_learning_rate(self._optimizer, rate)
        self._before_change()
        self._optimizer.step()
        self._scale.updated()
        self._begin_update()
        return sums

    def _reduced(self, parameters: Sequence[torch.nn.Parameter]) -> StepSums:
        """Of what was accumulated, over all ranks. A collective."""
        self._add_up(parameters)
        squares = self._squared_norm(parameters) / self._scale.value**2
        return self._statistics.reduce(self._ranks, squares)

    @property
    def _range_hint(self) -> str:
        if self._dtype is not torch.float16:
            return ""
        return " float16 ends at 65,504; model.dtype=bfloat16 has the range of float32."


def _overflowed(sums: StepSums) -> bool:
    """Whether the gradients alone left the range of numbers."""
    return bool(np.isfinite(sums.loss) and not np.isfinite(sums.grad_norm))
