"""Speculative decoding, described by a table of options.

    rollout.speculation = {method = "ngram", num_tokens = 4} ──► Speculation.of(...) ──► engines

A draft proposes the next tokens of a sequence, and one pass of the policy checks them. The sampled
tokens and their log-probabilities are those of the policy alone. Methods:

    ngram         repeats what followed the sequence's last tokens earlier in it; both engines
    draft_model   a smaller model of the same vocabulary; vllm
    eagle3        a head that reads the policy's hidden states; vllm
    mtp           the policy's own layers for further tokens; vllm

With `trained_along`, the trainer trains an EAGLE-3 head on the policy's hidden states, and each
version of the weights has the head too. Then `model` is the head to begin with, and may be absent.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsys.errors import InvalidValue, require

FIELD = "rollout.speculation"

METHODS = ("ngram", "draft_model", "eagle3", "mtp")
WITH_MODEL = ("draft_model", "eagle3")

MAX_TOKENS = 32  # tokens of one draft; longer ones are hardly ever accepted

# Fields of vLLM's SpeculativeConfig that go to vLLM as they are.
PASSED = (
    "attention_backend",
    "disable_eagle_block_drop",
    "disable_padded_drafter_batch",
    "draft_sample_method",
    "draft_tensor_parallel_size",
    "enforce_eager",
    "index_share_for_mtp_iteration",
    "kv_cache_dtype",
    "max_model_len",
    "moe_backend",
    "parallel_drafting",
    "quantization",
    "use_local_argmax_reduction",
)

# Fields of vLLM's SpeculativeConfig with another name here.
RENAMED = {
    "num_speculative_tokens": "num_tokens",
    "prompt_lookup_min": "min_match",
    "prompt_lookup_max": "max_match",
}


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Checked options of speculative decoding.

    Attributes:
        method: One of METHODS.
        num_tokens: Longest draft, in tokens.
        min_match: ngram: fewest last tokens that must have occurred before.
        max_match: ngram: last tokens that are compared.
        model: Path of the draft model or of the head. Empty with `trained_along`: a new head.
        trained_along: eagle3: train the head with the policy.
        learning_rate: Learning rate of the head.
        options: Further fields of vLLM's SpeculativeConfig.
    """

    method: str
    num_tokens: int = 4
    min_match: int = 2
    max_match: int = 4
    model: str = ""
    trained_along: bool = False
    learning_rate: float = 1e-4
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any], engine: str) -> Speculation | None:
        """Return the options of a table, or None for an empty one.

        Raises:
            InvalidValue: An option is unknown, has a wrong type, or does not fit the others.
        """
        if not values:
            return None
        require(
            "method" in values,
            f"{FIELD}.method",
            rule=f"is required by {FIELD}.{min(values)}",
            fix=f"Set it to one of {', '.join(METHODS)}.",
        )
        method = values["method"]
        require(
            method in METHODS,
            f"{FIELD}.method",
            method,
            rule="not a method of speculation",
            fix=f"Use one of {', '.join(METHODS)}.",
        )
        require(
            engine == "vllm" or method == "ngram",
            f"{FIELD}.method",
            method,
            rule="the torch engine drafts by ngram only",
            fix='Use ngram, or rollout.engine="vllm".',
        )
        require(
            "trained_along" not in values or method == "eagle3",
            f"{FIELD}.trained_along",
            values.get("trained_along"),
            rule=f"the trainer trains EAGLE-3 heads only, and the method is {method}",
            fix='Use method="eagle3", or leave it out.',
        )
        known = _names(str(method), engine)
        for name in values:
            if name not in known:
                raise _unknown(name, known, str(method))
        trained = bool(values.get("trained_along"))
        require(
            trained or "learning_rate" not in values,
            f"{FIELD}.learning_rate",
            values.get("learning_rate"),
            rule=f"has no effect without {FIELD}.trained_along",
            fix="Leave it out.",
        )
        require(
            not (trained and values.get("parallel_drafting")),
            f"{FIELD}.parallel_drafting",
            True,
            rule="a head that is trained along drafts one token after another",
            fix="Leave it out.",
        )
        own = {name: value for name, value in values.items() if name not in PASSED}
        rest = {name: value for name, value in values.items() if name in PASSED}
        made = cls(**own, options=rest)
        made._check()
        return made

    def _check(self) -> None:
        for name, highest in (("num_tokens", MAX_TOKENS), ("min_match", 32), ("max_match", 32)):
            value = getattr(self, name)
            require(
                type(value) is int and 1 <= value <= highest,
                f"{FIELD}.{name}",
                value,
                rule=f"must be a whole number from 1 to {highest}",
                fix="Use a number in this range, such as 4.",
            )
        require(
            self.min_match <= self.max_match,
            f"{FIELD}.min_match",
            self.min_match,
            rule=f"must be at most {FIELD}.max_match={self.max_match}",
            fix="Lower it.",
        )
        self._check_training()
        needs_model = self.method in WITH_MODEL
        require(
            isinstance(self.model, str) and (bool(self.model) == needs_model or self.trained_along),
            f"{FIELD}.model",
            self.model,
            rule=f"{self.method} {'needs a' if needs_model else 'has no'} model of its own",
            fix="Give a Hugging Face name or directory." if needs_model else "Leave it out.",
        )

    def _check_training(self) -> None:
        require(
            isinstance(self.trained_along, bool),
            f"{FIELD}.trained_along",
            self.trained_along,
            rule="must be true or false",
            fix="Use true to train the head.",
        )
        rate = self.learning_rate
        require(
            isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < 1,
            f"{FIELD}.learning_rate",
            rate,
            rule="must be a number above 0 and below 1",
            fix="Use a number such as 1e-4.",
        )

    def for_vllm(self, head: str = "") -> dict[str, Any]:
        """Return vLLM's speculative_config. `head` is the path of a new head."""
        config = {"method": self.method, "num_speculative_tokens": self.num_tokens, **self.options}
        if self.method == "ngram":
            config |= {"prompt_lookup_min": self.min_match, "prompt_lookup_max": self.max_match}
        if self.model or head:
            config["model"] = self.model or head
        return config


def untrained(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for an engine without a trainer; none if the head would be a new one."""
    if not values.get("trained_along"):
        return dict(values)
    rest = {k: v for k, v in values.items() if k not in ("trained_along", "learning_rate")}
    return rest if rest.get("model") else {}


def check_untrained(values: Mapping[str, Any], user: str) -> None:
    """Raise InvalidValue if a head is to be trained along where `user` trains none."""
    require(
        not values.get("trained_along"),
        f"{FIELD}.trained_along",
        True,
        rule=f"{user} trains no head",
        fix="Leave it out.",
    )


def _names(method: str, engine: str) -> list[str]:
    names = ["method", "num_tokens"]
    names += ["min_match", "max_match"] if method == "ngram" else []
    names += ["model"] if method in WITH_MODEL else []
    names += ["trained_along", "learning_rate"] if method == "eagle3" else []
    return names + (list(PASSED) if engine == "vllm" and method != "ngram" else [])


def _unknown(name: str, known: list[str], method: str) -> InvalidValue:
    near = [RENAMED[name]] if name in RENAMED else difflib.get_close_matches(name, known, n=1)
    return InvalidValue(
        f"{FIELD}.{name}",
        rule=f"not an option of {method}",
        fix=f"Did you mean {FIELD}.{near[0]}?" if near else f"It has {', '.join(known)}.",
    )
