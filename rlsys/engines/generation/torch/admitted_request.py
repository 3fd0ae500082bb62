"""A request that starts to run in the torch engine, with the cached part of its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.engines.generation.torch.kv_cache import Kept, round_up, slot_capacity
from rlsys.engines.generation.torch.prefix_cache import BLOCK, Prefix
from rlsys.types import ExpertArray, GenerationRequest

# Prompts are padded to a multiple of this.
PROMPT_BLOCK = 8

ParkedPrefix = Prefix[tuple[Kept, ExpertArray | None]]


@dataclass(frozen=True)
class Admitted:
    """A request that starts to run."""

    request: GenerationRequest
    prefix: ParkedPrefix | None  # cached part of its prompt

    @property
    def num_reused(self) -> int:
        """Prompt tokens whose keys and values are cached."""
        return 0 if self.prefix is None else self.prefix.num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass that runs its prompt, padding included."""
        num_new = len(self.request.prompt_token_ids) - self.num_reused
        return round_up(num_new, PROMPT_BLOCK if self.prefix is None else BLOCK)

    @property
    def shape(self) -> tuple[int, int]:
        """Prompts of equal shape share a pass, because rounding in attention depends on padding."""
        num_places = 0
        if self.prefix is not None:
            num_places = slot_capacity(self.num_reused + self.num_tokens)
        return num_places, self.num_tokens

    @property
    def prompt(self) -> tuple[str, tuple[int, ...]]:
        """Key of a row of the pass, which requests with the same prompt and adapter share."""
        return self.request.cache_salt, tuple(self.request.prompt_token_ids)
