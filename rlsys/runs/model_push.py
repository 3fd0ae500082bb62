"""Copy of an exported model to a hub or an object store.

    python -m rlsys.runs.model_push runs/quickstart/hf hf://ORG/NAME
    python -m rlsys.runs.model_push runs/quickstart/hf s3://BUCKET/PATH

Input: a directory and a target: hf://ORG/NAME for a repository of the Hugging Face hub, or a URL of
a file system that fsspec knows. Output: the files there. manifest.json, which has the size and the
checksum of every file, and exported.json arrive last.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from rlsys.common.manifest import MANIFEST_FILE, OnBytes, ignore_bytes
from rlsys.errors import InvalidValue, RunFailed, require
from rlsys.runs.export_seal import EXPORTED_FILE

HUB = "hf://"
LOCAL = ("file", "local")
# File systems of fsspec that end with the process, or that wrap another one.
NOT_STORES = (
    "memory",
    "dir",
    "generic",
    "reference",
    "cached",
    "blockcache",
    "filecache",
    "simplecache",
)
EXAMPLES = "s3://BUCKET/PATH, gs://BUCKET/PATH, file:///PATH or hf://ORG/NAME"
HUB_MODEL = re.compile(r"hf://[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class PushFailed(RunFailed):
    """The target refused a file or could not be reached. The message has the cause."""


def check_target(url: str, field: str = "push_to") -> None:
    """Check what is known of a target without the network.

    Raises:
        InvalidValue: It names no repository or no store that can be written, its package is not
            installed, or the hub's token is missing.
    """
    if url.startswith(HUB):
        _check_hub(url, field)
        return
    protocol, _, place = url.partition("://")
    if protocol in LOCAL:
        _check_directory(Path(place), url, field)
        return
    require(
        bool(place.strip("/")) and _can_keep_files(protocol, url, field),
        field,
        url,
        rule="names no store that keeps files",
        fix=f"Use {EXAMPLES}.",
    )


def _can_keep_files(protocol: str, url: str, field: str) -> bool:
    """Return whether fsspec can create directories in a file system, which others can read later.

    Raises:
        InvalidValue: fsspec does not know it, or its package is not installed.
    """
    import fsspec
    from fsspec.asyn import AsyncFileSystem

    try:
        system = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise InvalidValue(
            field,
            url,
            rule=f"needs a package that is not installed ({error})",
            fix="Install it with pip, in the environment that launches the run.",
        ) from error
    except ValueError as error:
        raise InvalidValue(
            field, url, rule=f"fsspec knows no file system {protocol!r}", fix=f"Use {EXAMPLES}."
        ) from error
    bases = (fsspec.AbstractFileSystem, AsyncFileSystem)
    makes_directories = any(
        getattr(system, name, None) not in [getattr(base, name, None) for base in bases]
        for name in ("mkdir", "_mkdir", "makedirs", "_makedirs")
    )
    return makes_directories and protocol not in NOT_STORES


def _check_directory(directory: Path, url: str, field: str) -> None:
    """Check that a local directory is absolute, and can be created or written."""
    require(
        directory.is_absolute(),
        field,
        url,
        rule="is not an absolute path",
        fix="Use file:///PATH, with three slashes.",
    )
    existing = next(one for one in (directory, *directory.parents) if one.exists())
    require(
        existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        field,
        url,
        rule=f"{existing} is not a directory that this user can write",
        fix="Choose another directory.",
    )


def push(directory: Path, url: str, on_bytes: OnBytes = ignore_bytes) -> None:
    """Copy all files of a directory to a target. Files that are there already are replaced.

    Raises:
        InvalidValue: As `check_target`.
        PushFailed: The copy is incomplete.
    """
    check_target(url)
    files = sorted(
        (path for path in directory.rglob("*") if path.is_file()),
        key=lambda path: (path.name in (MANIFEST_FILE, EXPORTED_FILE), path),
    )
    require(
        bool(files),
        str(directory),
        rule="holds no file to copy",
        fix="Give the directory of an exported model, such as runs/NAME/hf.",
    )
    try:
        if url.startswith(HUB):
            _push_to_hub(directory, url.removeprefix(HUB))
        else:
            _push_files(directory, files, url, on_bytes)
    except Exception as error:  # each file system has its own kinds of errors
        raise PushFailed(f"{directory} was not copied to {url}: {_cause(error)}") from error


def retry_command(directory: Path, url: str) -> str:
    """Return the shell command that copies the directory again."""
    return shlex.join(["python", "-m", "rlsys.runs.model_push", str(directory), url])


def _check_hub(url: str, field: str) -> None:
    from huggingface_hub import get_token

    require(
        HUB_MODEL.fullmatch(url) is not None,
        field,
        url,
        rule="names no model of the hub",
        fix="Use hf://ORG/NAME, where ORG is a user or an organization.",
    )
    require(
        get_token() is not None,
        field,
        url,
        rule="needs a token of the hub with write access",
        fix="Set HF_TOKEN, or run hf auth login.",
    )


def _push_to_hub(directory: Path, repository: str) -> None:
    """Upload to a repository in one commit. A new repository is private."""
    from huggingface_hub import HfApi

    hub = HfApi()
    hub.create_repo(repository, private=True, exist_ok=True)
    hub.upload_folder(
        repo_id=repository, folder_path=directory, commit_message="Upload model of rlsys"
    )


def _push_files(directory: Path, files: list[Path], url: str, on_bytes: OnBytes) -> None:
    from fsspec.core import url_to_fs

    system, root = url_to_fs(url)
    root = root.rstrip("/")
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        target = f"{root}/{path.relative_to(directory).as_posix()}"
        system.makedirs(target.rpartition("/")[0], exist_ok=True)
        system.put_file(str(path), target)
        size, found = path.stat().st_size, system.size(target)
        if found != size:
            raise OSError(f"{target} has {found} bytes there, and {size} here")
        done += size
        on_bytes(done, total)


def _cause(error: Exception) -> str:
    """Return the kind and the message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(" :")


def main() -> None:
    """Copy the directory that the command line names."""
    if len(sys.argv) != 3:
        print("usage: python -m rlsys.runs.model_push DIRECTORY URL", file=sys.stderr)
        raise SystemExit(2)
    from rlsys.runs.observe.phases import progress_on_stderr

    directory, url = Path(sys.argv[1]), sys.argv[2]
    try:
        with progress_on_stderr(f"Copying {directory} to {url}") as phase:
            push(directory, url, phase.update_bytes)
    except (ValueError, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f"{directory} is at {url}.")


if __name__ == "__main__":
    main()
