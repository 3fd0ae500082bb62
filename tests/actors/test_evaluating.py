"""Evaluation during training, over a fake worker."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from actors.cluster.calls import Worker, WorkerDied
from actors.workers.evaluation_actor import Evaluator, Found
from rlsys.common.supervision import EVALUATION
from rlsys.config import HeldOutConfig, RunConfig
from rlsys.environments.workers.loop_watchdog import Blocked
from rlsys.evaluation.held_out import export_path
from rlsys.evaluation.model_evaluation import Evaluation
from rlsys.runs.evaluation_log import EvaluationLog, find_damage, read_evaluations
from tests.evaluation.test_held_out import exported, found
from tests.histories import files_of_a_run

PATIENCE_S = 300.0
CONFIG = RunConfig(num_steps=40, evaluation=HeldOutConfig(every=10))

Answer = Callable[[str], Evaluation | Exception]


class FakeWorker:
    """Worker that evaluates a model when `release` is set; `answer` returns the result.

    With `blocks`, an episode blocks its event loop and it answers nothing.
    """

    def __init__(self, answer: Answer, release: asyncio.Event, *, blocks: bool) -> None:
        self._answer = answer
        self._release = release
        self._model = ""
        self.timeout_s = 1.0
        self.is_dead = False
        self._blocks = asyncio.Event()
        self._died = asyncio.Event()
        self._cause = ""
        if blocks:
            self._blocks.set()

    def end(self, cause: str) -> None:
        self.is_dead, self._cause = True, cause
        self._died.set()

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "start_evaluation":
            (self._model,) = args
            return None
        if method == "blocked":
            await self._blocks.wait()
            return Blocked(seconds=30.0, task="0.0", where="line 7")
        if self._blocks.is_set():
            await self._died.wait()
            raise WorkerDied(f"evaluation died: {self._cause}")
        await self._release.wait()
        result = self._answer(Path(self._model).name)
        if isinstance(result, Exception):
            self.is_dead = isinstance(result, WorkerDied)
            raise result
        return 1, Found.of(result)


class World:
    def __init__(self, path: Path, answer: Answer, *, first_step: int = 0) -> None:
        self.files = files_of_a_run(path)
        self.board = EvaluationLog(self.files, after_step=first_step)
        self.release = asyncio.Event()
        self.release.set()
        self.is_evaluating = asyncio.Event()
        self.results: list[Mapping[str, float]] = []
        self.warnings: list[str] = []
        self.num_progress_reports = 0
        self.started_workers: list[FakeWorker] = []
        self.is_full = False
        self.blocks = False
        self.evaluator = Evaluator(
            CONFIG,
            self.board,
            self.files.evaluating,
            start_worker=lambda: self.start_worker(answer),
            export=self.export,
            on_result=self.results.append,
            is_last=lambda step: False,
            on_progress=self.count,
            warn=self.warnings.append,
            first_step=first_step,
        )

    def count(self) -> None:
        self.num_progress_reports += 1

    def start_worker(self, answer: Answer) -> Worker:
        self.started_workers.append(FakeWorker(answer, self.release, blocks=self.blocks))
        self.is_evaluating.set()
        return cast(Worker, self.started_workers[-1])

    async def export(self, directory: Path) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "the disk is full")
        exported(self.files, int(directory.name.removeprefix("step_")))

    async def after(self, *steps: int) -> None:
        for step in steps:
            await self.evaluator.between_steps.after(step)
            await asyncio.sleep(0)

    async def finish(self) -> None:
        running = asyncio.create_task(self.evaluator.run())
        await asyncio.wait_for(self.evaluator.finish(), PATIENCE_S)
        running.cancel()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


def test_models_are_evaluated_in_order_and_the_best_one_stays(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, lambda name: found({"step_000010": 0.9}.get(name, 0.5)))
        for step in (0, 5, 10, 20, 40):
            await world.after(step)
            await world.finish()
        assert [line["step"] for line in world.results] == [0, 10, 20, 40]
        assert (world.files.best / "model.safetensors").read_text() == "of step 10"
        assert world.warnings == []
        assert len(world.started_workers) == 1

    run(work())


def test_training_continues_until_too_many_models_wait(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, lambda name: found(0.5))
        world.release.clear()
        running = asyncio.create_task(world.evaluator.run())
        await world.after(0, 10, 20)  # one is evaluated, two wait
        assert world.warnings == []
        fourth = asyncio.create_task(world.after(30))
        await asyncio.sleep(0)
        assert not fourth.done()
        assert "step 0" in world.warnings[0]
        world.release.set()
        await fourth
        await world.evaluator.finish()
        running.cancel()
        assert [line["step"] for line in world.results] == [0, 10, 20, 30]
        assert world.num_progress_reports >= 4
        assert not list(world.files.evaluating.iterdir())

    run(work())


def test_a_worker_that_dies_is_replaced_until_the_model_is_skipped(tmp_path: Path) -> None:
    deaths = [WorkerDied("evaluation died")] * (1 + EVALUATION.poison.max_deaths)

    async def work() -> None:
        world = World(tmp_path, lambda name: deaths.pop() if deaths else found(0.5))
        await world.after(0)
        await world.finish()  # all deaths but one
        await world.after(10)
        await world.finish()  # the last one
        assert [line["step"] for line in world.results] == [10]
        first, skipped, second = world.warnings
        assert first == second
        assert first.startswith("evaluation died;")
        assert "step 0" in skipped
        assert skipped.endswith(": evaluation died")
        assert len(world.started_workers) == EVALUATION.poison.max_deaths + 2
        assert not list(world.files.evaluating.iterdir())

    run(work())


def test_the_warning_about_a_blocked_worker_has_the_line(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, lambda name: found(0.5))
        world.blocks = True
        await world.after(0)
        await world.finish()
        world.blocks = False
        await world.after(10)
        await world.finish()
        assert len(world.warnings) == 2
        for warning in world.warnings:
            assert "evaluation died: " in warning
            assert " 30 s at line 7" in warning
        assert [line["step"] for line in world.results] == [10]

    run(work())


def test_the_worker_continues_after_a_failed_evaluation(tmp_path: Path) -> None:
    answers = {"step_000000": ValueError("only 0 of 8 prompts have samples")}

    async def work() -> None:
        world = World(tmp_path, lambda name: answers.get(name) or found(0.5))
        await world.after(0)
        await world.finish()
        await world.after(10)
        await world.finish()
        [warning] = world.warnings
        assert "step 0" in warning
        assert warning.endswith(str(answers["step_000000"]))
        assert [line["step"] for line in world.results] == [10]
        assert len(world.started_workers) == 1

    run(work())


def test_a_model_that_does_not_fit_on_the_disk_is_not_evaluated(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, lambda name: found(0.5))
        world.is_full = True
        await world.after(0)
        world.is_full = False
        await world.after(10)
        await world.finish()
        [warning] = world.warnings
        assert "step 0" in warning
        assert warning.endswith("[Errno 28] the disk is full")
        assert [line["step"] for line in world.results] == [10]

    run(work())


def test_a_resumed_run_evaluates_waiting_models_of_its_own_history(tmp_path: Path) -> None:
    async def work() -> None:
        before = World(tmp_path, lambda name: found(0.5))
        await before.after(0)
        await before.finish()
        for step in (10, 20):
            exported(before.files, step)
        world = World(tmp_path, lambda name: found(0.5), first_step=10)
        assert not export_path(world.files.evaluating, 20).exists()
        await world.after(10)  # is there already
        await world.finish()
        assert [line["step"] for line in world.results] == [10]

    run(work())


def test_repeated_steps_are_evaluated_again(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, lambda name: found(0.5))
        for step in (0, 10, 20):
            await world.after(step)
            await world.finish()
        world.evaluator.between_steps.go_back(15)
        await world.after(15, 20)
        await world.finish()
        assert [line["step"] for line in world.results] == [0, 10, 20, 20]

    run(work())


def test_a_model_whose_history_is_discarded_during_its_evaluation_is_not_logged(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        world = World(tmp_path, lambda name: found(0.5))
        world.release.clear()
        running = asyncio.create_task(world.evaluator.run())
        await world.after(10)
        await world.is_evaluating.wait()
        world.evaluator.between_steps.go_back(5)
        world.release.set()
        await world.evaluator.finish()
        assert world.results == []
        await world.after(10)
        await world.evaluator.finish()
        running.cancel()
        assert [line["step"] for line in world.results] == [10]
        assert len(world.warnings) == 1

    run(work())


def test_a_line_that_is_being_added_while_training_goes_back_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Adding takes a while if a large model becomes the best one.
    async def work() -> None:
        world = World(tmp_path, lambda name: found(0.5))
        is_adding, has_gone_back = asyncio.Event(), threading.Event()
        loop, add = asyncio.get_running_loop(), world.board.add

        def slow_add(*args: Any) -> dict[str, float]:
            loop.call_soon_threadsafe(is_adding.set)
            assert has_gone_back.wait(PATIENCE_S)
            return add(*args)

        monkeypatch.setattr(world.board, "add", slow_add)
        running = asyncio.create_task(world.evaluator.run())
        await world.after(20)
        await is_adding.wait()
        world.evaluator.between_steps.go_back(5)
        has_gone_back.set()
        await world.after(10)
        await world.evaluator.finish()
        assert [line["step"] for line in world.results] == [10]
        await world.after(20)
        await world.evaluator.finish()
        running.cancel()
        lines = read_evaluations(world.files.evaluations)
        assert [line["step"] for line in lines] == [10, 20]
        assert find_damage(world.files) == []

    run(work())
