"""What other runs have written, as it grows: the tails of their rollouts.jsonl.

In: the directory of all runs, and who of them is a peer. Out: `SharedGroup`s, each once a reading.
A peer that is slow, dead or gone just has nothing new; nobody waits for it.
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

# Of one file at one reading, at most: of a peer that is further ahead only the newest are read.
READ_BYTES = 16 << 20

# What all lines of a group have in common, beside the step and the number that make them one.
IN_COMMON = ("prompt", "asked", "row")

# Between two readings. Files may lie on another machine's disk, where nothing tells of a change.
EVERY_S = 0.5


class Tail:
    """The new lines of a file that another process appends to.

    A last line without its end is left for later. A file that was cut, or replaced by another, as a
    resumed run does with its records, is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._offset = 0  # of the first byte that was not read as part of a whole line

    def read(self) -> list[bytes]:
        try:
            return self._new_lines()
        except OSError:  # it is gone, or its file system is: it may come back
            self.close()
            return []

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _new_lines(self) -> list[bytes]:
        there = os.stat(self._path)
        # The file is kept open, so that no other can have its inode.
        if self._file is None or not os.path.samestat(there, os.fstat(self._file.fileno())):
            self.close()
            self._file = _opened(self._path)
            self._offset = 0
        if there.st_size < self._offset:
            self._offset = 0
        # The rest of the line in whose middle this lands is no JSON.
        self._offset = max(self._offset, there.st_size - READ_BYTES)
        self._file.seek(self._offset)
        read = self._file.read(READ_BYTES)
        end = read.rfind(b"\n") + 1
        if end == 0 and len(read) == READ_BYTES:  # one line, longer than any that is read
            end = len(read)
        self._offset += end
        return read[:end].splitlines()


def _opened(path: Path) -> IO[bytes]:
    """Raises OSError for what is no ordinary file: a pipe would be waited for, without end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no ordinary file")
    return os.fdopen(descriptor, "rb")


class Peer:
    """One run whose groups are read: the first `group_size` rollouts of each group that has as
    many, less what it has itself taken from others, and what the run `own` (a run_id) sampled.
    """

    def __init__(self, name: str, directory: Path, *, own: str, group_size: int) -> None:
        self._name = name
        self._own = own
        self._group_size = group_size
        self._tail = Tail(directory / FILE)
        self._begun: list[dict[str, Any]] = []  # rollouts of a group that is not whole yet
        self._has_warned = False

    def read(self) -> list[SharedGroup]:
        groups = []
        for line in self._tail.read():
            try:
                record = parse_json(line)
            except ValueError:  # as the rest of a line may be
                self._begun = []
                continue
            try:
                if (group := self._add(record)) is not None:
                    groups.append(group)
            # Somebody else's file: what is no record of ours is passed over.
            except (
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                ArithmeticError,
                RecursionError,
            ) as error:
                self._begun = []
                self._warn(error)
        return groups

    def close(self) -> None:
        self._tail.close()

    def _warn(self, error: Exception) -> None:
        """Once."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a group in %s of %s cannot be read (%s: %s). It is passed over, as others of the "
                "kind are.",
                FILE,
                self._name,
                type(error).__name__,
                error,
            )

    def _add(self, record: dict[str, Any]) -> SharedGroup | None:
        """The group that this record makes whole. Records of one stand together, in order."""
        if (
            record.get("shared_by")
            or record.get("run_id") == self._own
            # A token that no policy sampled is text like any other here, and would be trained on.
            or INJECTED in record.get("policy_versions", ())
        ):
            self._begun = []
            return None
        if record["index"] == 0:
            self._begun = []
        elif record["index"] != len(self._begun) or any(
            self._begun[0][name] != record[name] for name in ("step", "group_id")
        ):
            self._begun = []
            return None
        self._begun.append(record)
        if len(self._begun) < self._group_size:
            return None
        records, self._begun = self._begun, []
        return _group(self._name, records)


def _group(peer: str, records: Sequence[dict[str, Any]]) -> SharedGroup:
    """Raises ValueError, LookupError or OverflowError where these lines are no group."""
    first = records[0]
    for name in IN_COMMON:
        if not all(is_flat(one.get(name)) for one in records):
            raise ValueError(f"its {name} is nested more than {MAX_NESTING} deep")
        if len({canonical(one.get(name)) for one in records}) > 1:
            raise ValueError(f"its lines have different values of {name}")
    return SharedGroup(
        peer=peer,
        group_id=_of(int, first, "group_id"),
        asked=first["prompt"] if first.get("asked") is None else first["asked"],
        row=_of(dict, first, "row"),
        completions=[
            SharedCompletion(
                text=_of(str, one, "completion"), truncated=one["finish_reason"] == "length"
            )
            for one in records
        ],
        rewards=[_reward(one) for one in records],
    )


def _of(kind: type[T], record: dict[str, Any], name: str) -> T:
    """Raises ValueError for a value of another type."""
    value = record[name]
    if type(value) is not kind:
        raise ValueError(f"its {name} is {reprlib.repr(value)}, which is no {kind.__name__}")
    return value


def _reward(record: dict[str, Any]) -> float:
    """Raises ValueError or OverflowError for what is no finite number."""
    reward = record["reward"]
    if type(reward) not in (int, float) or not math.isfinite(reward):
        raise ValueError(f"the reward {reprlib.repr(reward)} is no finite number")
    return float(reward)


class Peers:
    """All runs below `runs_dir` that `shared` names, but for the one called `own`; looked for at
    each reading. A run with several names, through links, counts once. What the run `run_id` has
    sampled is nobody else's, in whatever file it stands.
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
        for peer in self._peers.values():
            peer.close()

    def _names(self) -> Sequence[str]:
        paths: set[Path] = set()
        for pattern in self._shared.peers:
            with contextlib.suppress(OSError):  # as of a tail
                paths.update(self._runs_dir.glob(f"{pattern}/{FILE}"))
        by_file: dict[tuple[int, int], Path] = {}
        # Links come last, so that a run goes by its own name.
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


class Reading:
    """A thread that reads peers every EVERY_S: a file system that hangs holds up nobody else.
    `tell` is given what is new; `check` raises what has ended the thread, a bug.
    """

    def __init__(self, peers: Peers, tell: Callable[[list[SharedGroup]], None]) -> None:
        self._peers = peers
        self._tell = tell
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = start_thread(self._run, name="peers", fail=self._failed)

    def close(self) -> None:
        """Without waiting for a file system that may hang."""
        self._ended.set()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._tell(self._peers.read())
                self._ended.wait(EVERY_S)
        finally:
            self._peers.close()

    def _failed(self, error: BaseException) -> None:
        self._failure = error
