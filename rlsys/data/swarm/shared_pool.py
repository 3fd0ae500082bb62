"""Selection of the groups of other runs that a run trains on.

    peers' rollouts.jsonl ─► Peers (peers.py) ─► SharedPool ─► ExternalPrompts (external_prompts.py)

A swarm (SAPO, 2509.08721) is a number of ordinary runs. Each has its own policy and its own
directory, and reads the rollouts that the others write into theirs. No run waits for another.
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
from rlsys.config import RunConfig
from rlsys.errors import require

# Groups kept per peer, in steps that take all their external groups from it. Older groups come from
# an outdated policy.
KEPT_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Other runs whose rollouts a run trains on, in addition to its own."""

    peers: Sequence[str]
    """Names of other runs below runs_dir, or patterns of names ("swarm-*"), which also match runs
    that start later."""
    groups_per_step: int
    """Groups of a step that come from other runs. Only groups whose rewards differ count. If there
    are too few, the run samples the rest itself."""

    def __post_init__(self) -> None:
        require(
            not isinstance(self.peers, str),
            "peers",
            self.peers,
            rule="is a text, not a list",
            fix="Give a list of names.",
        )
        require(
            self.groups_per_step >= 0,
            "groups_per_step",
            self.groups_per_step,
            rule="must not be negative",
            fix="Use 0 for none.",
        )
        require(
            self.groups_per_step == 0 or len(self.peers) > 0,
            "groups_per_step",
            self.groups_per_step,
            rule="there are no peers",
            fix="Name peers, or use 0.",
        )
        for peer in self.peers:
            path = PurePosixPath(peer)
            require(
                bool(path.parts) and not path.is_absolute() and ".." not in path.parts,
                "peers",
                peer,
                rule="is not the name of a run below runs_dir or a pattern of names",
                fix='Give a name, or a pattern such as "swarm-*".',
            )

    def check(self, config: RunConfig) -> None:
        """Raise InvalidValue if a run cannot use these peers."""
        require(
            self.groups_per_step <= config.prompts_per_step,
            "groups_per_step",
            self.groups_per_step,
            rule=f"is more than prompts_per_step={config.prompts_per_step}",
            fix=f"Use at most {config.prompts_per_step}.",
        )
        require(
            config.name not in self.peers,
            "peers",
            list(self.peers),
            rule=f"contains the run itself, name={config.name!r}",
            fix="Name other runs, or use a pattern, which skips the run itself.",
        )
        require(
            config.observe.record_groups >= config.prompts_per_step,
            "observe.record_groups",
            config.observe.record_groups,
            rule="other runs read rollouts.jsonl, which then lacks some of the "
            f"{config.prompts_per_step} groups of a step",
            fix=f"Use at least {config.prompts_per_step}.",
        )


def may_be_shared(index: int, *, groups_per_step: int, prompts_per_step: int) -> bool:
    """Return whether a prompt index may get a group of another run.

    Any `prompts_per_step` consecutive indices have `groups_per_step` of them, spread evenly.
    """
    before, after = (n * groups_per_step // prompts_per_step for n in (index, index + 1))
    return after > before


@dataclass(frozen=True, kw_only=True)
class SharedCompletion:
    """A completion of a shared group."""

    text: str
    truncated: bool  # by sampling.max_tokens


@dataclass(frozen=True, kw_only=True)
class SharedGroup:
    """A prompt and its rollouts, sampled by the run `peer`."""

    peer: str
    group_id: int  # in the peer's run
    asked: Any  # the value of the prompt column: a text, or a list of messages
    row: Mapping[str, Any]  # the other columns of the row
    completions: Sequence[SharedCompletion]  # [G]
    rewards: Sequence[float] = ()  # [G], by the peer's reward functions

    @property
    def key(self) -> str:
        """Identity of the group: its number and a hash of its texts.

        It does not depend on the peer's name. A run that starts anew under its name has other keys.
        """
        content = [self.asked, [asdict(completion) for completion in self.completions]]
        digest = hashlib.sha256(canonical(content).encode()).hexdigest()
        return f"{self.group_id}:{digest[:16]}"

    @property
    def rewards_differ(self) -> bool:
        """Return whether the group has advantages other than 0."""
        return len(set(self.rewards)) > 1


class SharedPool:
    """The newest groups of each peer whose rewards differ and that were not taken.

    `taken` has the keys of groups that were taken before a resume. One thread may add groups while
    another takes them.
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
        """Add groups, and drop the oldest ones of each peer."""
        with self._lock:
            for group in groups:
                key = group.key
                if not group.rewards_differ or key in self._taken or self._has(key):
                    continue
                of_peer = self._groups.setdefault(group.peer, {})
                of_peer[key] = group
                while len(of_peer) > self._num_kept:
                    del of_peer[next(iter(of_peer))]

    def take(self, index: int) -> SharedGroup | None:
        """Return a random group for a prompt index, or None if there is none.

        All groups are equally likely. The same seed, index and groups give the same group.
        """
        with self._lock:
            found = [(peer, key) for peer in sorted(self._groups) for key in self._groups[peer]]
            if not found:
                return None
            peer, key = random.Random(f"{self._seed}.{index}").choice(found)
            self._taken.add(key)
            return self._groups[peer].pop(key)

    def _has(self, key: str) -> bool:
        """Return whether any peer offers this group: a copy of a run has the same groups."""
        return any(key in of_peer for of_peer in self._groups.values())
