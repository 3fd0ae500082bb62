"""Checks of model paths and hub names, and offline mode if the Hugging Face hub is unreachable.

Without a network the hub's own libraries retry for 25 seconds for each model and dataset. Here one
short attempt decides. If it fails, the libraries use their caches only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from urllib.parse import urlsplit

from rlsys.common.option_names import option
from rlsys.errors import InvalidValue, require

# A connection takes tens of milliseconds; an unreachable name server does not answer for longer.
PROBE_S = 2.0

OFFLINE = "HF_HUB_OFFLINE"

# Maximum characters of an error message that is quoted.
MAX_REASON = 400


def unreadable() -> tuple[type[Exception], ...]:
    """Return the exceptions that transformers raises for a model directory that it cannot read.

    It reads files before it checks them.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ImportError,
        RuntimeError,
        ArithmeticError,  # sizes of 0
        AssertionError,
        StrictDataclassError,
        SafetensorError,
        UnpicklingError,  # .bin files with more than tensors, which are not executed
    )


def in_short(error: BaseException) -> str:
    """Return the message of an error and of its first cause on one line.

    All lines of the message are kept, because the cause is often in the last one. A message longer
    than MAX_REASON loses its middle. A message of a single word is preceded by its type.
    """
    if isinstance(error, UnpicklingError):
        return "its .bin file is damaged, or contains more than tensors, which is not executed"
    text, root = _one_line(error), _root(error)
    cause = _one_line(root)
    is_name = not str(root).strip() or " " not in str(root).strip()
    if is_name or cause in text:
        return text
    return f"{text.rstrip('.')}; caused by {type(root).__name__}: {cause}"


def _one_line(error: BaseException) -> str:
    words, kind = " ".join(str(error).split()), type(error).__name__
    if len(words) > MAX_REASON:
        words = f"{words[: MAX_REASON // 2]} [...] {words[-MAX_REASON // 2 :]}"
    return words if " " in words else f"{kind}: {words}".rstrip(": ")


def _root(error: BaseException) -> BaseException:
    """Return the first of the errors that led to this one."""
    seen = {id(error)}
    while True:
        hidden = error.__suppress_context__
        cause = error.__cause__ or (None if hidden else error.__context__)
        if cause is None or id(cause) in seen:
            return error
        seen.add(id(cause))
        error = cause


def check_model_path(path: str, *, setting: str = "model.path") -> None:
    """Raise InvalidValue about `setting` unless `path` can be a model.

    It must be a directory or a hub name. If the hub is unreachable, its cache must hold the model.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(path).is_dir():
        check_no_run(path, setting=setting)
        return
    require(
        not Path(path).exists(),
        setting,
        path,
        rule="is a file",
        fix="Give the directory that contains it, with config.json.",
    )
    try:
        is_cached = isinstance(try_to_load_from_cache(path, "config.json"), str)
    except HFValidationError:
        is_cached = False
        is_name = False
    else:
        is_name = not path.startswith((".", "~"))
    require(
        is_name,
        setting,
        path,
        rule=f"is not a directory (looked in {Path.cwd()}) and not a hub name",
        fix="Give a Hugging Face model directory or hub name.",
    )
    require(
        is_cached or not constants.is_offline_mode(),
        setting,
        path,
        rule=f"is not a directory (looked in {Path.cwd()}), is not in the hub's cache, and the hub "
        f"cannot be reached ({constants.ENDPOINT}, {OFFLINE})",
        fix="Give a model directory, or check the network.",
    )


def check_no_run(model_path: str, *, setting: str = "model.path") -> None:
    """Raise InvalidValue about `setting` for a run directory, which has a config.json too."""
    path = Path(model_path)
    if not ((path / "metrics.jsonl").is_file() and (path / "config.json").is_file()):
        return
    exported = path / "hf"
    if (exported / "config.json").is_file():
        fix = f"Give the model that it exported, {str(exported)!r}."
    else:
        fix = f"It exports a model (hf/) when it ends: let it finish with {option('resume', True)}."
    raise InvalidValue(setting, str(path), rule="is a run directory, not a model", fix=fix)


@contextlib.contextmanager
def offline_where_unreachable(*names: str) -> Iterator[None]:
    """Put the hub's libraries into offline mode for the block if the hub does not answer.

    This includes processes that start within the block. `names` are what the block looks up on the
    hub. If all of them are local files or directories, the hub is not contacted.
    """
    if not any(name and not Path(name).exists() for name in names):
        yield
        return
    import datasets
    from huggingface_hub import constants

    if constants.is_offline_mode() or _answers(_first_hop(constants.ENDPOINT)):
        yield
        return
    before = os.environ.get(OFFLINE), datasets.config.HF_HUB_OFFLINE
    os.environ[OFFLINE] = "1"
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = False, before[1]
        if before[0] is None:
            os.environ.pop(OFFLINE, None)
        else:
            os.environ[OFFLINE] = before[0]


def _first_hop(endpoint: str) -> tuple[str, int]:
    """Return the host and port that a request to `endpoint` connects to: a proxy's, if any."""
    address = urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(address.scheme)
    if proxy and not urllib.request.proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return address.hostname or "", address.port or (80 if address.scheme == "http" else 443)


def _answers(address: tuple[str, int]) -> bool:
    """Return whether a connection succeeds. Uses a thread: a name lookup has no time limit."""
    found = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection(address, PROBE_S):
            found.set()

    prober = threading.Thread(target=connect, daemon=True)
    prober.start()
    prober.join(PROBE_S)
    return found.is_set()
