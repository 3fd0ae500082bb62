"""Readers of the growing rollouts.jsonl of other runs.

In: the directory of all runs, and the names of the peers. Out: `SharedGroup`s, each of them once.
A peer that is slow, dead or deleted has nothing new. Nothing waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import reprlib
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from rlsys.common.background_tasks import start_thread
from rlsys.common.safe_json import MAX_NESTING, canonical, is_flat, parse_json
from rlsys.data.swarm.shared_pool import Shared, SharedCompletion, SharedGroup
from rlsys.types import INJECTED

logger = logging.getLogger(__name__)

T = TypeVar("T")

FILE = "rollouts.jsonl"

# Maximum bytes of one file per read. Older lines of a peer that is further ahead are skipped.
READ_BYTES = 16 << 20

# Keys with equal values in all lines of a group, in addition to its step and number.
COMMON_KEYS = ("prompt", "asked", "row")

# Time between two reads. Network file systems do not notify of changes, so files are polled.
INTERVAL_S = 0.5


class Tail:
    """Reader of the new lines of a file to which another process appends.

    An incomplete last line is read later. A file that was cut or replaced, as a resumed run does
    with its records, is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._offset = 0  # of the first byte after the complete lines that were read

    def read(self) -> list[bytes]:
        """Return the complete lines since the last call."""
        try:
            return self._new_lines()
        except OSError:  # the file or its file system is gone, and may come back
            self.close()
            return []

    def close(self) -> None:
        """Close the file. A later read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _new_lines(self) -> list[bytes]:
        there = os.stat(self._path)
        # The file stays open, so that no other file can get its inode.
        if self._file is None or not os.path.samestat(there, os.fstat(self._file.fileno())):
            self.close()
            self._file = _opened(self._path)
            self._offset = 0
        if there.st_size < self._offset:
            self._offset = 0
        # If this is in the middle of a line, the rest of that line is not valid JSON.
        self._offset = max(self._offset, there.st_size - READ_BYTES)
        self._file.seek(self._offset)
        read = self._file.read(READ_BYTES)
        end = read.rfind(b"\n") + 1
        if end == 0 and len(read) == READ_BYTES:  # a line longer than READ_BYTES
            end = len(read)
        self._offset += end
        return read[:end].splitlines()


def _opened(path: Path) -> IO[bytes]:
    """Open an ordinary file. Raise OSError for others: reading a pipe would block forever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not an ordinary file")
    return os.fdopen(descriptor, "rb")


class Peer:
    """A run whose groups are read.

    It gives the first `group_size` rollouts of each group that has so many. Groups that the peer
    took from other runs, or that the run with the run_id `own` sampled, are skipped.
    """

    def __init__(self, name: str, directory: Path, *, own: str, group_size: int) -> None:
        self._name = name
        self._own = own
        self._group_size = group_size
        self._tail = Tail(directory / FILE)
        self._partial: list[dict[str, Any]] = []  # rollouts of an incomplete group
        self._has_warned = False

    def read(self) -> list[SharedGroup]:
        """Return the groups that were completed since the last call."""
        groups = []
        for line in self._tail.read():
            try:
                record = parse_json(line)
            except ValueError:  # such as the rest of a line
                self._partial = []
                continue
            try:
                if (group := self._add(record)) is not None:
                    groups.append(group)
            # Another program's file may have any content. Skip it.
            except (
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                ArithmeticError,
                RecursionError,
            ) as error:
                self._partial = []
                self._warn(error)
        return groups

    def close(self) -> None:
        """Close the peer's file."""
        self._tail.close()

    def _warn(self, error: Exception) -> None:
        """Log a warning for the first group that cannot be read."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a group in %s of %s cannot be read (%s: %s). Such groups are skipped.",
                FILE,
                self._name,
                type(error).__name__,
                error,
            )

    def _add(self, record: dict[str, Any]) -> SharedGroup | None:
        """Return the group that this record completes. The records of a group are consecutive."""
        if (
            record.get("shared_by")
            or record.get("run_id") == self._own
            # Here a token that no policy sampled looks like any other, and would be trained on.
            or INJECTED in record.get("policy_versions", ())
        ):
            self._partial = []
            return None
        if record["index"] == 0:
            self._partial = []
        elif record["index"] != len(self._partial) or any(
            self._partial[0][name] != record[name] for name in ("step", "group_id")
        ):
            self._partial = []
            return None
        self._partial.append(record)
        if len(self._partial) < self._group_size:
            return None
        records, self._partial = self._partial, []
        return _group(self._name, records)


def _group(peer: str, records: Sequence[dict[str, Any]]) -> SharedGroup:
    """Return the group of these lines, or raise ValueError, LookupError or OverflowError."""
    first = records[0]
    for name in COMMON_KEYS:
        if not all(is_flat(one.get(name)) for one in records):
            raise ValueError(f"its {name} is nested more than {MAX_NESTING} deep")
        if len({canonical(one.get(name)) for one in records}) > 1:
            raise ValueError(f"its lines have different values of {name}")
    return SharedGroup(
        peer=peer,
        group_id=_typed(int, first, "group_id"),
        asked=first["prompt"] if first.get("asked") is None else first["asked"],
        row=_typed(dict, first, "row"),
        completions=[
            SharedCompletion(
                text=_typed(str, one, "completion"), truncated=one["finish_reason"] == "length"
            )
            for one in records
        ],
        rewards=[_reward(one) for one in records],
    )


def _typed(kind: type[T], record: dict[str, Any], name: str) -> T:
    """Return the value of a key, or raise ValueError if it has another type."""
    value = record[name]
    if type(value) is not kind:
        raise ValueError(f"its {name} is {reprlib.repr(value)}, not of type {kind.__name__}")
    return value


def _reward(record: dict[str, Any]) -> float:
    """Return the reward, or raise ValueError or OverflowError if it is not a finite number."""
    reward = record["reward"]
    if type(reward) not in (int, float) or not math.isfinite(reward):
        raise ValueError(f"the reward {reprlib.repr(reward)} is not a finite number")
    return float(reward)


class Peers:
    """All runs below `runs_dir` that `shared` names, except for the run `own`.

    Each read looks for new runs. A run with several names, through links, counts once. Rollouts of
    the run with the id `run_id` are skipped in every file.
    """

    def __init__(
        self, runs_dir: Path, shared: Shared, *, own: str, run_id: str, group_size: int
    ) -> None:
        self._runs_dir = runs_dir.resolve()
        self._shared = shared
        self._own_file = self._runs_dir / own / FILE
        self._run_id = run_id
        self._group_size = group_size
        self._peers: dict[str, Peer] = {}

    def read(self) -> list[SharedGroup]:
        """Return the groups that the peers completed since the last call."""
        names = self._names()
        for gone in self._peers.keys() - set(names):
            self._peers.pop(gone).close()
        groups = []
        for name in names:
            if name not in self._peers:
                directory = self._runs_dir / name
                self._peers[name] = Peer(
                    name, directory, own=self._run_id, group_size=self._group_size
                )
            groups += self._peers[name].read()
        return groups

    def close(self) -> None:
        """Close the files of all peers."""
        for peer in self._peers.values():
            peer.close()

    def _names(self) -> Sequence[str]:
        paths: set[Path] = set()
        for pattern in self._shared.peers:
            with contextlib.suppress(OSError):
                paths.update(self._runs_dir.glob(f"{pattern}/{FILE}"))
        by_file: dict[tuple[int, int], Path] = {}
        # Links come last, so that a run gets its own name.
        for path in [
            self._own_file,
            *sorted(paths, key=lambda p: (os.path.realpath(p) != str(p), p)),
        ]:
            with contextlib.suppress(OSError):
                there = os.stat(path)
                by_file.setdefault((there.st_dev, there.st_ino), path)
        return [
            str(path.parent.relative_to(self._runs_dir))
            for path in by_file.values()
            if path != self._own_file
        ]


class PeerReader:
    """Thread that reads peers every INTERVAL_S.

    A file system that hangs blocks only this thread. `receive` gets the new groups.
    """

    def __init__(self, peers: Peers, receive: Callable[[list[SharedGroup]], None]) -> None:
        self._peers = peers
        self._receive = receive
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = start_thread(self._run, name="peers", fail=self._failed)

    def close(self) -> None:
        """Stop the thread, without waiting for a file system that may hang."""
        self._ended.set()

    def check(self) -> None:
        """Raise the error that ended the thread, which is a bug."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._receive(self._peers.read())
                self._ended.wait(INTERVAL_S)
        finally:
            self._peers.close()

    def _failed(self, error: BaseException) -> None:
        self._failure = error
