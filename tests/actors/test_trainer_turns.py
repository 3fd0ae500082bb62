"""Models that share a trainer: turns, limits and failures, over workers without engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.cluster.calls import WorkerDied
from actors.tinker_server.primitive_trainer_actor import LostModel, RefusedCommand, ServedModel
from actors.tinker_server.shared_trainer import RayTrainer, TrainerHost, TrainerPool
from rlsys.config import ClusterConfig, ModelConfig, RolloutConfig, TrainerConfig
from rlsys.errors import InvalidValue
from rlsys.tinker_server.api_errors import PartDied
from rlsys.tinker_server.call_engine import PassOutput
from rlsys.tinker_server.datum_rows import DataRows
from rlsys.tinker_server.server_backend import StepParams
from rlsys.types import TrainRow


@dataclass
class FakeRank:
    """A rank that answers when a test lets it."""

    name: str
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)  # by method
    is_free: asyncio.Event = field(default_factory=asyncio.Event)
    num_running: int = 0
    cause: str = ""
    died: asyncio.Event = field(default_factory=asyncio.Event)

    async def start_call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        if self.cause:
            raise WorkerDied(f"{self.name} died during {method}: {self.cause}")
        self.calls.append((method, *args))
        self.num_running += 1
        assert self.num_running == 1, "calls run one at a time"
        await self.is_free.wait()
        self.num_running -= 1
        if self.cause:
            raise WorkerDied(f"{self.name} died during {method}: {self.cause}")
        if method in self.answers:
            return self.answers.pop(method)
        match method:
            case "rendezvous":
                return "node", "host", 1
            case "forward_backward":
                found = {int(row.group_id): np.zeros(3, np.float32) for row in args[1]}
                return PassOutput(logprobs=found, loss=float(len(args[1])))
            case "optim_step":
                return {"policy_version": 1.0}
        return None

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        return await self.start_call(method, *args)

    async def watch(self) -> None:
        await self.died.wait()
        raise WorkerDied(f"{self.name} died: {self.cause}")

    def end(self, cause: str) -> None:
        self.cause = self.cause or cause
        self.died.set()

    def kill(self) -> None:
        self.end("killed")


@dataclass
class Trainers:
    """A pool, its ranks in the order of their start, and its models."""

    ranks: list[FakeRank] = field(default_factory=list)
    models_per_trainer: int = 2
    pool: Any = None
    served: Any = None
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.served = ServedModel(
            name="tiny",
            model=ModelConfig(path="tiny"),
            trainer=TrainerConfig(micro_batch_tokens=8),
            rollout=RolloutConfig(),
            cluster=ClusterConfig(),
            max_adapters=4,
            models_per_trainer=self.models_per_trainer,
        )
        self.pool = TrainerPool(self.served, self._start)

    def _start(self, served: ServedModel, name: str, is_shared: bool) -> TrainerHost:
        self.ranks.append(FakeRank(f"trainer-0 of {name}"))
        self.ranks[-1].is_free.set()
        workers: Any = [self.ranks[-1]]
        return TrainerHost(
            name, workers, is_shared=is_shared, start_timeout_s=10.0, warn=self.warnings.append
        )

    async def model(self, name: str, lora: str = "r4a32", owner: str = "") -> RayTrainer:
        trainer = RayTrainer(name, self.served, lora, 0, owner or name, self.pool)
        await trainer.start()
        return trainer


def scenario(run: Callable[[Trainers], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        await run(Trainers(**options))

    asyncio.run(asyncio.wait_for(main(), 20))


def rows(count: int) -> DataRows:
    """Return rows of four tokens each."""
    found = [
        TrainRow(
            prompt_token_ids=np.zeros(1, np.int32),
            token_ids=np.zeros(3, np.int32),
            policy_versions=np.zeros(3, np.int32),
            loss_mask=np.ones(3, np.bool_),
            columns={},
            group_id=number,
            group_size=1,
            group_num_tokens=3,
        )
        for number in range(count)
    ]
    return DataRows(rows=found, num_targets=[0] * count, shapes=[(3,)] * count)


def loss(_: Any) -> Any:
    raise AssertionError("the ranks call it")


def test_adapters_share_a_process_up_to_the_limit_and_whole_models_do_not() -> None:
    async def run(made: Trainers) -> None:
        models = [await made.model(name) for name in "abc"]
        await made.model("whole", lora="")
        assert [len(rank.calls) for rank in made.ranks] == [4, 3, 3]
        assert [rank.name.rpartition(" ")[2] for rank in made.ranks] == [
            "host-1",
            "host-2",
            "whole",
        ]
        await models[2].close()  # the only model of its host
        assert made.ranks[1].cause
        await models[0].close()
        await made.model("d")
        assert ("open", "d", "r4a32", 0) in made.ranks[0].calls

    scenario(run)


def test_models_take_turns_also_within_a_long_pass() -> None:
    async def run(made: Trainers) -> None:
        first, second = await made.model("a"), await made.model("b")
        (rank,) = made.ranks
        rank.calls.clear()
        long = asyncio.create_task(first.forward_backward(rows(10), loss, backward=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        short = asyncio.create_task(second.optim_step(StepParams()))
        found = await long
        assert await short == {"policy_version": 1.0}
        # 40 tokens in parts of two micro-batches, 16 tokens.
        assert [call[:2] for call in rank.calls] == [
            ("forward_backward", "a"),
            ("optim_step", "b"),
            ("forward_backward", "a"),
            ("forward_backward", "a"),
        ]
        assert [len(call[2]) for call in rank.calls if call[1] == "a"] == [4, 4, 2]
        assert (found.loss, len(found.logprobs)) == (10.0, 10)

    scenario(run)


def test_an_error_within_one_model_ends_that_model_alone() -> None:
    async def run(made: Trainers) -> None:
        first, second = await made.model("a"), await made.model("b")
        made.ranks[0].answers["load"] = LostModel("KeyError: 'x'")
        with pytest.raises(PartDied):
            await first.load(Path("state"), optimizer=True)
        made.ranks[0].answers["optim_step"] = RefusedCommand(
            InvalidValue("optim_step", rule="there is no gradient", fix="Compute one.")
        )
        with pytest.raises(InvalidValue):
            await second.optim_step(StepParams())
        assert await second.optim_step(StepParams()) == {"policy_version": 1.0}

    scenario(run)


def test_a_dead_process_ends_its_models_and_the_next_one_gets_another() -> None:
    async def run(made: Trainers) -> None:
        first, second = await made.model("a"), await made.model("b")
        made.ranks[0].cause = "killed"
        for model in (first, second):
            with pytest.raises(PartDied):
                await model.optim_step(StepParams())
        third = await made.model("c")
        assert len(made.ranks) == 2
        assert await third.optim_step(StepParams()) == {"policy_version": 1.0}

    scenario(run)


def test_the_death_of_a_process_is_reported_once_also_while_it_is_idle() -> None:
    async def run(made: Trainers) -> None:
        first, second = await made.model("a"), await made.model("b")
        made.ranks[0].end("killed")
        for _ in range(10):
            await asyncio.sleep(0)
        (line,) = made.warnings
        assert line.startswith("trainer-0 of host-1 died: killed; ")
        assert line.endswith("a, b")
        for model in (first, second):
            with pytest.raises(PartDied):
                await model.discard()
        third = await made.model("c")
        await third.close()
        await made.pool.close()  # an end that was requested is no death
        await asyncio.sleep(0.01)
        assert made.warnings == [line]

    scenario(run)


def test_a_process_that_died_unnoticed_is_replaced_for_a_new_model() -> None:
    async def run(made: Trainers) -> None:
        await made.model("a")
        made.ranks[0].cause = "killed"
        second = await made.model("b")
        assert len(made.ranks) == 2
        assert await second.optim_step(StepParams()) == {"policy_version": 1.0}

    scenario(run)


def test_a_cancelled_command_keeps_its_turn_until_it_has_ended() -> None:
    """The session of the first model ends in the middle of a command."""

    async def run(made: Trainers) -> None:
        first, second = await made.model("a"), await made.model("b")
        (rank,) = made.ranks
        rank.is_free.clear()
        running = asyncio.create_task(first.optim_step(StepParams()))
        waiting = asyncio.create_task(first.discard())
        await asyncio.sleep(0.01)
        later = asyncio.create_task(second.optim_step(StepParams()))
        await asyncio.sleep(0.01)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        await first.close()
        assert rank.num_running == 1
        rank.is_free.set()
        assert await later == {"policy_version": 1.0}
        await second.discard()
        assert [call[:2] for call in rank.calls[4:]] == [
            ("optim_step", "a"),
            ("optim_step", "b"),
            ("drop", "a"),
            ("discard", "b"),
        ]

    scenario(run)
