"""The sections `data` and `sampling` of the configuration: prompts and their completions."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.config.checks import check_at_least, check_fraction
from rlsys.config.fields import Section, conform
from rlsys.errors import require
from rlsys.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The prompts to train on."""

    source: str = ""
    """Hub dataset, file (.jsonl, .json, .csv, .parquet, .arrow), pattern such as a-*.jsonl, or
    directory. Several: A,B in sequence, A*0.7,B*0.3 as a mixture (docs/formats.md). Leave it empty
    in recipes that create their own rows."""
    subset: str | None = None
    """Configuration of a hub dataset, such as "main"."""
    split: str = "train"
    """Split of a hub dataset or a directory. A part such as train[:90%] works for every source."""
    prompt_column: str = "prompt"
    """Column with the prompt, or a dotted path such as extra_info.question. The prompt is a string
    or a list of chat messages."""
    system_prompt: str | None = None
    """System message put before each prompt; needs chat_template."""
    chat_template: bool = False
    """Render prompts with the tokenizer's chat template instead of using them as plain text."""
    template_options: tuple[str, ...] = ()
    """Options of the model's chat template as NAME=VALUE, such as enable_thinking=false. VALUE is
    JSON, or else text. Environments use them too."""
    max_prompt_tokens: int = 1024
    """Longest prompt, in tokens. A longer one is an error unless skip_long_prompts is on."""
    skip_long_prompts: bool = False
    """Skip rows with a too long prompt or completion, with a warning, instead of rejecting the
    dataset."""
    shuffle: bool = True
    """Shuffle the rows in each epoch, with the run's seed."""
    retire_at: float | None = None
    """Mean reward of a prompt's rollouts from which on later epochs skip the prompt. Unset: never
    skip one."""

    def __post_init__(self) -> None:
        conform(self, "data")
        check_at_least("data.max_prompt_tokens", self.max_prompt_tokens, 1)
        require(
            self.system_prompt is None or self.chat_template,
            "data.system_prompt",
            self.system_prompt,
            rule="has no effect without data.chat_template",
            fix="Set data.chat_template=true.",
        )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    """Sampling of completions."""

    temperature: float = 1.0
    """Temperature of sampling, and of the trainer's log-probabilities. For completions from a
    dataset (SFT, DPO), 1 is used."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the smallest set of tokens with this probability. 1 is off.
    Below 1 the trainer's ratios, which use all tokens, are too large."""
    top_k: int = 0
    """Sample from this many most likely tokens. 0 is off. The trainer's ratios are as with top_p.
    """
    max_tokens: int = 256
    """Longest completion, in tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion and remain part of it. Special tokens are compared as text."""
    interrupt_after: int | None = None
    """Completion tokens after which unfinished thinking is interrupted. The text of interruption
    follows, which is not trained on, then an answer within max_tokens. A reply of an environment
    has its own count, and is not interrupted if its limits leave no room for an answer. Unset:
    never."""
    interruption: str = "\n\nTime is up; I answer with what I have.\n</think>\n\n"
    """Text that ends the thinking. Its last word, such as </think>, marks the end of the thinking
    in a completion."""

    def __post_init__(self) -> None:
        conform(self, "sampling")
        require(
            self.temperature > 0,
            "sampling.temperature",
            self.temperature,
            rule="must be above 0, since training needs log-probabilities",
            fix="Use a value such as 1.0.",
        )
        check_fraction("sampling.top_p", self.top_p, fix="Use 1 to turn it off.")
        check_at_least("sampling.top_k", self.top_k, 0, fix="Use 0 to turn it off.")
        check_at_least("sampling.max_tokens", self.max_tokens, 1)
        require(
            all(self.stop),
            "sampling.stop",
            self.stop,
            rule="contains an empty string, which would end each completion at once",
            fix="Remove it.",
        )
        require(
            self.interrupt_after is None or 1 <= self.interrupt_after < self.max_tokens,
            "sampling.interrupt_after",
            self.interrupt_after,
            rule=f"must be at least 1 and below sampling.max_tokens={self.max_tokens}, since the "
            "answer needs tokens too",
            fix="Use a number in this range, or leave it out.",
        )
        require(
            bool(self.interruption.split()),
            "sampling.interruption",
            self.interruption,
            rule="must be a text whose last word ends the thinking",
            fix="Give a text such as </think>.",
        )

    def params(self) -> SamplingParams:
        """Return the parameters of a generation request."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop=self.stop,
        )
