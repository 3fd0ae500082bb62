"""Prompts of which some come with the rollouts of another run.

    index ──► a place for an external group? ── no ──► the run's own data
                 │ yes
                 ├─ decided before: external.jsonl ─┐
                 └─ else: SharedPool, and written ──┴─► its group, or the run's own data

Which group a prompt index got is written before anybody learns of it. So a group of the ledger that
is issued again, in this process or after a crash, is the same one, whether its peer is still there
or not.
"""

from __future__ import annotations

import contextlib
import logging
import reprlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import Tally
from rlsys.config import RunConfig, require
from rlsys.data.prompt_rendering import TOOLS_COLUMN
from rlsys.data.prompts import PromptSource
from rlsys.data.swarm.external_log import ExternalLog
from rlsys.data.swarm.peers import Peers, Reading
from rlsys.data.swarm.shared_pool import Shared, SharedCompletion, SharedGroup, SharedPool, is_place
from rlsys.rewards.column_paths import value_at
from rlsys.rewards.reward import Reward, is_missing, is_of, not_of
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import Completion, FinishReason, Prompt

logger = logging.getLogger(__name__)

# A run whose peers offer nothing for so many steps says so: they may be slower, but hardly so much.
VAIN_STEPS = 20


class Encoder:
    """Groups of other runs as this run's model reads them: `prompts` renders their prompts,
    `tokenizer` is the model's. What `rewards` read must be in each row.
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
            "the tokenizer has no end of sequence (eos_token), which completions of other runs end "
            "with; set one.",
        )
        self._prompts = prompts
        self._boundary = TokenizerBoundary(tokenizer)
        self._max_tokens = max_tokens
        self._stop = tuple(stop)
        self._rewards = rewards

    def __call__(self, index: int, group: SharedGroup) -> Prompt:
        """Raises ValueError for what this run cannot read, or has no room for."""
        where = f"group {group.group_id} of {group.peer}"
        for one in self._rewards:
            for name in one.required_columns:
                value = value_at(group.row, name)
                require(not is_missing(value), f"{where} has no {name!r}, which a reward reads.")
                require(
                    not one.column_types or is_of(value, one.column_types),
                    f"{name!r} of {where}: {reprlib.repr(value)} {not_of(value, one.column_types)}",
                )
        tools = group.row.get(TOOLS_COLUMN)
        text, token_ids = self._prompts.rendered(group.asked, where, tools=tools)
        self._boundary.alphabet.check(text, where)
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
        # Another text would be another completion, which nobody gave.
        (token_ids,) = self._boundary.encode_written([text], where)
        if not shared.truncated and not text.endswith(self._stop):
            token_ids = self._boundary.ended(token_ids)
        require(
            0 < len(token_ids) <= self._max_tokens,
            f"{where} has a completion of {len(token_ids)} tokens; sampling.max_tokens="
            f"{self._max_tokens}.",
        )
        return Completion(
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=FinishReason.LENGTH if shared.truncated else FinishReason.STOP,
        )


class ExternalPrompts:
    """`own` prompts, `groups_per_step` of `prompts_per_step` of which are replaced by what `take`
    gives for their index and `encode` can read.
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
        self._refused: set[str] = set()  # peers of which something was
        self._num_vain = 0  # places in a row for which there was no group

    def row(self, index: int) -> int:
        """Which row of the run's own data it is; -1 for another run's prompt."""
        return self.at(index).row if self._may_be_external(index) else self._own.row(index)

    def at(self, index: int) -> Prompt:
        """The prompt with this index over the run; always the same."""
        if not self._may_be_external(index):
            return self._own.at(index)
        if index not in self._log:
            return self._decide(index)
        group = self._log.group(index)
        return self._own.at(index) if group is None else self._encode(index, group)

    @property
    def tally(self) -> Tally:
        """Of external.jsonl, as it is now."""
        return self._log.tally

    def _may_be_external(self, index: int) -> bool:
        return is_place(
            index, groups_per_step=self._groups_per_step, prompts_per_step=self._prompts_per_step
        )

    def _decide(self, index: int) -> Prompt:
        while (group := self._take(index)) is not None:
            try:
                prompt = self._encode(index, group)
            except ValueError as error:
                if group.peer not in self._refused:
                    self._refused.add(group.peer)
                    logger.warning("%s It is passed over, as others of the kind are.", error)
                continue
            self._log.decide(index, group)
            self._num_vain = 0
            return prompt
        self._log.decide(index, None)
        self._count_vain()
        return self._own.at(index)

    def _count_vain(self) -> None:
        self._num_vain += 1
        if self._num_vain == VAIN_STEPS * self._groups_per_step:
            logger.warning(
                "no other run has offered a group to train on for %d steps: its peers have not "
                "begun, are gone, or get equal rewards within each group. The run samples all by "
                "itself meanwhile.",
                VAIN_STEPS,
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
    """Peers are read until the context ends. `rewards` score their groups; `path`: of
    external.jsonl, which has been looked at (check_issued); `run_id`: of the run itself.
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
        with contextlib.closing(Reading(peers, pool.add)) as reading:

            def take(index: int) -> SharedGroup | None:
                reading.check()
                return pool.take(index)

            yield ExternalPrompts(
                own,
                groups_per_step=shared.groups_per_step,
                prompts_per_step=config.prompts_per_step,
                take=take,
                encode=encode,
                log=log,
            )
