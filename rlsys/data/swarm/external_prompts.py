"""Prompts of a run, some of which come with the rollouts of another run.

    index ──► may be a group of another run? ── no ──► the run's own data
                 │ yes
                 ├─ decided before: external.jsonl ─┐
                 └─ else: SharedPool, then written ─┴─► its group, or the run's own data

The group of a prompt index is written to disk before it is used. So a group that is issued again,
in this process or after a crash, is the same one, even if its peer is gone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import Tally
from rlsys.config import RunConfig
from rlsys.data.prompt_rendering import TOOLS_COLUMN
from rlsys.data.prompts import PromptSource
from rlsys.data.swarm.external_log import ExternalLog
from rlsys.data.swarm.peers import PeerReader, Peers
from rlsys.data.swarm.shared_pool import (
    Shared,
    SharedCompletion,
    SharedGroup,
    SharedPool,
    may_be_shared,
)
from rlsys.errors import require
from rlsys.rewards.column_paths import value_at
from rlsys.rewards.reward import Reward, check_type, is_missing
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import Completion, FinishReason, Prompt

logger = logging.getLogger(__name__)

# After so many steps without a group from its peers, a run logs a warning.
WARN_AFTER_STEPS = 20


class Encoder:
    """Encoder of other runs' groups for this run's model.

    Args:
        prompts: Renders the prompts.
        tokenizer: The tokenizer of this run's model.
        max_tokens: Maximum tokens of a completion.
        stop: Texts that end a completion.
        rewards: Score the groups. Each row must have the columns that they require.
    """

    def __init__(
        self,
        prompts: PromptSource,
        tokenizer: Any,
        *,
        max_tokens: int,
        stop: Sequence[str],
        rewards: Sequence[Reward],
    ) -> None:
        require(
            tokenizer.eos_token_id is not None,
            "model.path",
            rule="the tokenizer has no end of sequence (eos_token), which ends the completions of "
            "other runs",
            fix="Set one.",
        )
        self._prompts = prompts
        self._boundary = TokenizerBoundary(tokenizer)
        self._max_tokens = max_tokens
        self._stop = tuple(stop)
        self._rewards = rewards

    def __call__(self, index: int, group: SharedGroup) -> Prompt:
        """Return the prompt of a group with its completions.

        Raises:
            InvalidValue: This run cannot read the group, or it is too long.
        """
        where = f"group {group.group_id} of {group.peer}"
        for one in self._rewards:
            for name in one.required_columns:
                value = value_at(group.row, name)
                require(
                    not is_missing(value),
                    f"{where}: {name}",
                    value,
                    rule=f"reward {one.name!r} reads this column, and it has no value",
                    fix="Share rollouts of a dataset with this column.",
                )
                check_type(value, one.column_types, f"{where}: {name}")
        tools = group.row.get(TOOLS_COLUMN)
        text, token_ids = self._prompts.rendered(group.asked, where, tools=tools)
        self._boundary.alphabet.check(text, where, change="the prompt")
        return Prompt(
            index=index,
            token_ids=token_ids,
            text=text,
            asked=None if group.asked == text else group.asked,
            metadata=group.row,
            completions=tuple(self._completion(one, where) for one in group.completions),
            shared_by=group.peer,
        )

    def _completion(self, shared: SharedCompletion, where: str) -> Completion:
        text = shared.text
        # Tokens of another text would be another completion, which no policy sampled.
        (token_ids,) = self._boundary.encode_written([text], where, change="the completion")
        if not shared.truncated and not text.endswith(self._stop):
            token_ids = self._boundary.ended(token_ids)
        require(
            0 < len(token_ids) <= self._max_tokens,
            where,
            rule=f"a completion has {len(token_ids)} tokens, not 1 to "
            f"sampling.max_tokens={self._max_tokens}",
            fix="Use the same sampling.max_tokens in all runs.",
        )
        return Completion(
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=FinishReason.LENGTH if shared.truncated else FinishReason.STOP,
        )


class ExternalPrompts:
    """Prompts of a run, some of them replaced by groups of other runs.

    Args:
        own: The run's own prompts.
        groups_per_step: How many of `prompts_per_step` prompts may be replaced.
        prompts_per_step: Prompts of a step.
        take: Returns a group for a prompt index, or None.
        encode: Returns the prompt of a group, or raises ValueError.
        log: Records which index got which group.
    """

    def __init__(
        self,
        own: PromptSource,
        *,
        groups_per_step: int,
        prompts_per_step: int,
        take: Callable[[int], SharedGroup | None],
        encode: Callable[[int, SharedGroup], Prompt],
        log: ExternalLog,
    ) -> None:
        self._own = own
        self._groups_per_step = groups_per_step
        self._prompts_per_step = prompts_per_step
        self._take = take
        self._encode = encode
        self._log = log
        self._refused: set[str] = set()  # peers with a group that could not be encoded
        self._num_without = 0  # consecutive indices that could have had a group and got none

    def row(self, index: int) -> int:
        """Return the row of the run's own data, or -1 for another run's prompt."""
        return self.at(index).row if self._may_be_external(index) else self._own.row(index)

    def at(self, index: int) -> Prompt:
        """Return the prompt with this index over the run. It is always the same one."""
        if not self._may_be_external(index):
            return self._own.at(index)
        if index not in self._log:
            return self._decide(index)
        group = self._log.group(index)
        return self._own.at(index) if group is None else self._encode(index, group)

    @property
    def tally(self) -> Tally:
        """Size and checksum of external.jsonl."""
        return self._log.tally

    def _may_be_external(self, index: int) -> bool:
        return may_be_shared(
            index, groups_per_step=self._groups_per_step, prompts_per_step=self._prompts_per_step
        )

    def _decide(self, index: int) -> Prompt:
        while (group := self._take(index)) is not None:
            try:
                prompt = self._encode(index, group)
            except ValueError as error:
                if group.peer not in self._refused:
                    self._refused.add(group.peer)
                    logger.warning("skipping this and similar groups of other runs: %s", error)
                continue
            self._log.decide(index, group)
            self._num_without = 0
            return prompt
        self._log.decide(index, None)
        self._count_without()
        return self._own.at(index)

    def _count_without(self) -> None:
        self._num_without += 1
        if self._num_without == WARN_AFTER_STEPS * self._groups_per_step:
            logger.warning(
                "no other run has offered a group for %d steps: the peers have not started, have "
                "ended, or get equal rewards within each group. Until they do, this run samples "
                "all prompts itself.",
                WARN_AFTER_STEPS,
            )


@contextlib.contextmanager
def external_prompts(
    own: PromptSource,
    shared: Shared,
    *,
    config: RunConfig,
    tokenizer: Any,
    rewards: Sequence[Reward],
    path: Path,
    run_id: str,
) -> Iterator[ExternalPrompts]:
    """Read peers until the context ends, and yield the prompts of the run.

    Args:
        own: The run's own prompts.
        shared: Names the peers.
        config: The run's configuration.
        tokenizer: The tokenizer of the policy.
        rewards: Score the groups of peers.
        path: external.jsonl, after `check_issued`.
        run_id: Identifies this run, whose own rollouts are not read from any file.
    """
    encode = Encoder(
        own,
        tokenizer,
        max_tokens=config.sampling.max_tokens,
        stop=config.sampling.stop,
        rewards=rewards,
    )
    with contextlib.closing(ExternalLog(path)) as log:
        pool = SharedPool(seed=config.seed, groups_per_step=shared.groups_per_step, taken=log.keys)
        peers = Peers(
            Path(config.runs_dir),
            shared,
            own=config.name,
            run_id=run_id,
            group_size=config.group_size,
        )
        with contextlib.closing(PeerReader(peers, pool.add)) as reader:

            def take(index: int) -> SharedGroup | None:
                reader.check()
                return pool.take(index)

            yield ExternalPrompts(
                own,
                groups_per_step=shared.groups_per_step,
                prompts_per_step=config.prompts_per_step,
                take=take,
                encode=encode,
                log=log,
            )
