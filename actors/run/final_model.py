"""The end of a run: the trained models as files, and a copy of the main one at `push_to`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from rlsys.common.background_tasks import start_thread
from rlsys.config import RunConfig
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import Model
from rlsys.engines.models.model_shape import model_shape
from rlsys.errors import RunFailed
from rlsys.launcher.memory_estimate import export_bytes, role_shape
from rlsys.runs.export_seal import EarlyEnd, seal_export
from rlsys.runs.model_push import push, retry_command
from rlsys.runs.observe.console import RunConsole
from rlsys.runs.observe.disk_progress import showing_bytes
from rlsys.runs.run_files import RunFiles

from ..trainer.trainer_proxy import RayTrainerProxy


async def export_models(
    config: RunConfig,
    flow: StageGraph,
    trainer_proxies: Mapping[str, RayTrainerProxy],
    files: RunFiles,
    console: RunConsole,
    *,
    step: int,
    early_end: EarlyEnd | None,
) -> None:
    """Export all trained policies after the last step, the main one last."""

    async def export(model: Model, directory: Path, title: str) -> None:
        path = config.model.path
        shape = model_shape(path, model.head) if model.is_main else role_shape(config, model)
        total = export_bytes(config, shape)
        with console.phase(title) as phase:
            async with showing_bytes(phase, directory, total):
                await trainer_proxies[model.name].export_final(directory)
            run_id = files.run_id
            await asyncio.to_thread(
                seal_export, directory, step, run_id=run_id, early_end=early_end
            )

    for name in flow.other_policies:
        await export(flow.models[name], files.hf_path(name), f"Exporting {name}")
    await export(flow.main, files.hf, "Exporting the model")


async def push_model(config: RunConfig, files: RunFiles, console: RunConsole) -> None:
    """Copy the exported model, if the configuration says where to.

    A failure is a warning with the command that tries it again: the model is on disk.
    """
    if not config.push_to:
        return
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    with console.phase(f"Copying the model to {config.push_to}") as phase:

        def copy() -> None:
            push(files.hf, config.push_to, phase.update_bytes)
            loop.call_soon_threadsafe(done.set_result, None)

        def fail(error: BaseException) -> None:
            loop.call_soon_threadsafe(done.set_exception, error)

        # A daemon thread: Ctrl-C does not wait for an upload.
        start_thread(copy, name="push", fail=fail)
        try:
            await done
            return
        except (RunFailed, ValueError, OSError) as error:
            message = str(error)
    console.warn(f"{message}. Try again with: {retry_command(files.hf, config.push_to)}")
