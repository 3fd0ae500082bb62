"""Rollouts that other runs share: which of their groups a run may train on, and which it takes.

    peers' rollouts.jsonl ─► Peers (peers.py) ─► SharedPool ─► ExternalPrompts (external_prompts.py)

A swarm (SAPO, 2509.08721) is a number of ordinary runs. Each has its own policy and its own
directory, and reads what the others write into theirs; nobody waits for anybody.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from rlsys.common.safe_json import canonical
from rlsys.config import RunConfig, require

# Groups of each peer that wait to be taken: as many as so many steps could take from it alone. What
# is older was sampled by a policy that its owner has left behind.
KEPT_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Whose rollouts a run trains on beside its own."""

    peers: Sequence[str]
    """Names of other runs below runs_dir, or patterns of names ("swarm-*"), which find those too
    that begin later."""
    groups_per_step: int
    """Groups of a step that come from them, of those that have rewards which differ; while they
    offer too few, the run samples in their stead."""

    def __post_init__(self) -> None:
        require(
            not isinstance(self.peers, str),
            f"peers={self.peers!r} is one text; give a list of names.",
        )
        require(
            self.groups_per_step >= 0,
            f"groups_per_step={self.groups_per_step} of peers is negative; use 0 for none.",
        )
        require(
            self.groups_per_step == 0 or len(self.peers) > 0,
            f"groups_per_step={self.groups_per_step} shall come from other runs, but there are no "
            "peers; name some, or use 0.",
        )
        for peer in self.peers:
            path = PurePosixPath(peer)
            require(
                bool(path.parts) and not path.is_absolute() and ".." not in path.parts,
                f"peers={list(self.peers)}: {peer!r} is no name of a run below runs_dir, nor a "
                'pattern of names such as "swarm-*".',
            )

    def check(self, config: RunConfig) -> None:
        """Raises ValueError for a run that these do not fit."""
        require(
            self.groups_per_step <= config.prompts_per_step,
            f"{self.groups_per_step} groups a step from other runs are more than "
            f"prompts_per_step={config.prompts_per_step}; use at most as many.",
        )
        require(
            config.name not in self.peers,
            f"peers={list(self.peers)} names the run itself, name={config.name!r}; name others. "
            "(A pattern may match it, and leaves it out.)",
        )
        require(
            config.observe.record_groups >= config.prompts_per_step,
            f"observe.record_groups={config.observe.record_groups} keeps some of the "
            f"prompts_per_step={config.prompts_per_step} groups of a step from the other runs, "
            "which read them in rollouts.jsonl; use at least as many.",
        )


def is_place(index: int, *, groups_per_step: int, prompts_per_step: int) -> bool:
    """Whether a group of another run may stand at this prompt index. Any prompts_per_step indices
    that follow each other have groups_per_step places, spread evenly.
    """
    before, after = (n * groups_per_step // prompts_per_step for n in (index, index + 1))
    return after > before


@dataclass(frozen=True, kw_only=True)
class SharedCompletion:
    text: str
    truncated: bool  # by the limit on tokens


@dataclass(frozen=True, kw_only=True)
class SharedGroup:
    """One prompt and its rollouts, sampled by the run called `peer`."""

    peer: str
    group_id: int  # there
    asked: Any  # the value of its prompt column: a text, or a list of messages
    row: Mapping[str, Any]  # the row's other columns
    completions: Sequence[SharedCompletion]  # [G]
    rewards: Sequence[float] = ()  # [G], by the peer's functions

    @property
    def key(self) -> str:
        """What it is known by, under whatever names its run is found: its number there and what
        was said. A run that was begun anew under its name has others.
        """
        content = [self.asked, [asdict(completion) for completion in self.completions]]
        digest = hashlib.sha256(canonical(content).encode()).hexdigest()
        return f"{self.group_id}:{digest[:16]}"

    @property
    def teaches(self) -> bool:
        """Its rewards differ: only then has it advantages other than 0."""
        return len(set(self.rewards)) > 1


class SharedPool:
    """The newest groups of each peer that teach something and were not taken.

    `taken`: keys of those that earlier parts of the run took. One thread may add while another
    takes.
    """

    def __init__(self, *, seed: int, groups_per_step: int, taken: Iterable[str] = ()) -> None:
        self._seed = seed
        self._num_kept = KEPT_STEPS * groups_per_step
        self._taken = set(taken)
        self._groups: dict[str, dict[str, SharedGroup]] = {}  # by peer and key, oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def add(self, groups: Iterable[SharedGroup]) -> None:
        with self._lock:
            for group in groups:
                key = group.key
                if not group.teaches or key in self._taken or self._waits(key):
                    continue
                of_peer = self._groups.setdefault(group.peer, {})
                of_peer[key] = group
                while len(of_peer) > self._num_kept:
                    del of_peer[next(iter(of_peer))]

    def take(self, index: int) -> SharedGroup | None:
        """One of them for the prompt with this index, each as likely as any other; None if there is
        none. The same for the same seed, index and groups.
        """
        with self._lock:
            found = [(peer, key) for peer in sorted(self._groups) for key in self._groups[peer]]
            if not found:
                return None
            peer, key = random.Random(f"{self._seed}.{index}").choice(found)
            self._taken.add(key)
            return self._groups[peer].pop(key)

    def _waits(self, key: str) -> bool:
        """Whoever offers it: a copy of a peer's files has the same groups."""
        return any(key in of_peer for of_peer in self._groups.values())
