"""Names on the Hugging Face hub, and whether the hub can be reached at all.

Without a network the hub's own libraries try again for 25 seconds, model and dataset one after the
other. Here one short try decides; where it fails, they are told to look into their caches only.
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
from rlsys.config import require

# A connection takes tens of milliseconds; a name server that is out of reach is silent for longer.
PROBE_S = 2.0

OFFLINE = "HF_HUB_OFFLINE"

# Longest message of an error that is quoted, in characters.
MAX_REASON = 400


def unreadable() -> tuple[type[Exception], ...]:
    """What transformers raises for a model directory that it can make nothing of: it reads files
    before it checks them.
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
        ArithmeticError,  # of sizes of 0
        AssertionError,
        StrictDataclassError,
        SafetensorError,
        UnpicklingError,  # of .bin files with more than tensors, which are not run
    )


def in_short(error: BaseException) -> str:
    """Return the message of an error on one line, and the error that caused it.

    All lines of the message are kept, because the cause is often in the last one. A message longer
    than MAX_REASON loses its middle. A message that is a mere name gets its type.
    """
    if isinstance(error, UnpicklingError):
        return "its .bin file is damaged, or holds more than tensors, which is not run"
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
    """Raise ValueError where `path` is neither a directory nor the name of a model that is in the
    hub's cache, or on a hub that is not known to be out of reach; `setting` gives it.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(path).is_dir():
        check_no_run(path, setting=setting)
        return
    require(
        not Path(path).exists(),
        f"{setting}={path!r} is a file; give the directory that holds it, with config.json.",
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
        f"{setting}={path!r} is no directory (looked in {Path.cwd()}), and no hub name either; "
        "give a Hugging Face model directory or hub name.",
    )
    require(
        is_cached or not constants.is_offline_mode(),
        f"{setting}={path!r} holds no model: it is no directory (looked in "
        f"{Path.cwd()}), it is not in the hub's cache, and the hub cannot be reached "
        f"({constants.ENDPOINT}, {OFFLINE}); give a directory, or mend the network.",
    )


def check_no_run(model_path: str, *, setting: str = "model.path") -> None:
    """Raise ValueError for a run's directory, which has a config.json too; its model is inside.
    `setting` gives the path.
    """
    path = Path(model_path)
    if not ((path / "metrics.jsonl").is_file() and (path / "config.json").is_file()):
        return
    exported = path / "hf"
    raise ValueError(
        f"{setting}={str(path)!r} is a run's directory, no model; "
        + (
            f"give the model that it exported, {str(exported)!r}."
            if (exported / "config.json").is_file()
            else "it has exported none yet, which the end of a run does (hf/); let it finish with "
            f"{option('resume', True)}."
        )
    )


@contextlib.contextmanager
def offline_where_unreachable(*names: str) -> Iterator[None]:
    """A block in which the hub's libraries, in this process and in those that it starts, do without
    the network if the hub does not answer. `names` are those that are looked up there; local
    directories and files among them are none, and without any the hub is not asked.
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
    """Host and port that a request to `endpoint` goes to first: a proxy's, where there is one."""
    address = urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(address.scheme)
    if proxy and not urllib.request.proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return address.hostname or "", address.port or (80 if address.scheme == "http" else 443)


def _answers(address: tuple[str, int]) -> bool:
    """Whether somebody listens there. In a thread: looking up a name knows no time limit."""
    found = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection(address, PROBE_S):
            found.set()

    prober = threading.Thread(target=connect, daemon=True)
    prober.start()
    prober.join(PROBE_S)
    return found.is_set()
