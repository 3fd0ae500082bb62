"""Copy of the trained model to `push_to`, after the run."""

from __future__ import annotations

import asyncio

from rlsys.common.background_tasks import start_thread
from rlsys.config import RunConfig
from rlsys.errors import RunFailed
from rlsys.runs.model_push import MB, push, retry_command
from rlsys.runs.observe.console import RunConsole
from rlsys.runs.run_directory import RunFiles


async def push_model(config: RunConfig, files: RunFiles, console: RunConsole) -> None:
    """Copy the exported model, if the configuration says where to.

    A failure is a warning with the command that tries it again: the model is on disk.
    """
    if not config.push_to:
        return
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    with console.phase(f"Copying the model to {config.push_to}") as phase:

        def show(num_bytes: int, total: int) -> None:
            phase.update(num_bytes // MB, total // MB, "MB")

        def copy() -> None:
            push(files.hf, config.push_to, show)
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
