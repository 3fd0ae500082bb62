"""Everything of this package by name, for command lines and files, and as tables.

In: text such as `corrected(clipped_surrogate(0.2, 0.28, denominator="proximal"), tis(2.0))`, and
which kind of thing it should be. Out: that object. Only the names of this page, numbers, strings,
True, False and None have a meaning in it; nothing is evaluated as Python.

`python -m rlsys.algorithms.registry` prints the tables of docs/algorithms.md.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from rlsys.algorithms import (
    advantages,
    aggregation,
    composed,
    corrections,
    group_functions,
    kl_control,
    losses,
    masks,
    preferences,
    token_advantages,
    turn_credit,
    values,
)
from rlsys.common.user_functions import name_of
from rlsys.errors import InvalidValue

Kind = Literal[
    "loss",
    "correction",
    "value_loss",
    "score_loss",
    "group_advantage",
    "batch_advantage",
    "token_advantage",
    "aggregation",
    "kl_control",
]

_BY_KIND: dict[Kind, tuple[Callable[..., Any], ...]] = {
    "loss": (
        losses.reinforce,
        losses.cross_entropy,
        losses.top_k_distill,
        losses.clipped_surrogate,
        composed.decoupled_clipped_surrogate,
        losses.gspo,
        losses.gmpo,
        losses.cispo,
        losses.aipo,
        composed.m2po,
        losses.sapo_soft,
        losses.dppo_mask,
        composed.corrected,
        composed.interpolate_proximal,
        composed.with_kl,
        composed.kl_cov,
        composed.entropy_bonus,
        composed.distill,
        composed.observed,
        preferences.dpo,
        preferences.ipo,
        preferences.slic,
        preferences.simpo,
        preferences.orpo,
    ),
    "correction": (
        corrections.tis,
        corrections.sequence_tis,
        corrections.icepop,
        corrections.sequence_icepop,
        corrections.batch_weights,
        masks.opsm,
        masks.reject,
        masks.second_moment,
        masks.high_entropy,
        masks.clip_cov,
    ),
    "value_loss": (values.value_loss, values.clipped_value_loss),
    "score_loss": (preferences.bradley_terry,),
    "group_advantage": (
        advantages.grpo_advantage,
        advantages.dr_grpo_advantage,
        advantages.rloo_advantage,
        advantages.opo_advantage,
        advantages.remax_advantage,
        advantages.pass_at_k_advantage,
        group_functions.dynamic_sampling,
    ),
    "batch_advantage": (
        advantages.reinforce_plus_plus_advantage,
        advantages.reinforce_plus_plus_baseline_advantage,
        advantages.scale_rl_advantage,
    ),
    "token_advantage": (
        token_advantages.gae,
        token_advantages.reinforce_plus_plus_token_advantage,
        token_advantages.kl_rewards,
        token_advantages.whitened,
        token_advantages.batch_normalised_weights,
        turn_credit.turn_advantage,
        turn_credit.turn_mean_advantage,
        turn_credit.turn_batch_advantage,
    ),
    "aggregation": (
        aggregation.token_mean,
        aggregation.sequence_mean,
        aggregation.prompt_mean,
        aggregation.constant_length,
        aggregation.sequence_sum,
        aggregation.token_sum,
    ),
    "kl_control": (kl_control.fixed_kl, kl_control.adaptive_kl),
}


@dataclass(frozen=True)
class RegistryEntry:
    name: str
    kind: Kind
    target: Callable[..., Any]

    @property
    def is_made(self) -> bool:
        """Whether the name stands for something to be made, by a class or by a function of
        constants; else it is itself the function that the graph calls.
        """
        return inspect.isclass(self.target) or self.kind == "loss"

    @property
    def constants(self) -> dict[str, inspect.Parameter]:
        """The parameters that text can give: of a function over tensors its constants alone."""
        return {
            name: parameter
            for name, parameter in inspect.signature(self.target).parameters.items()
            if self.is_made
            or (parameter.kind is parameter.KEYWORD_ONLY and parameter.annotation in _LITERALS)
        }

    @property
    def signature(self) -> str:
        """`gspo(clip_low=0.0003, clip_high=0.0004, denominator='sampler')`."""
        parts = []
        for name, parameter in inspect.signature(self.target).parameters.items():
            default = parameter.default
            parts.append(name if default is parameter.empty else f"{name}={default!r}")
        return f"{self.name}({', '.join(parts)})"

    @property
    def written(self) -> str:
        """What text can say: the same with the constants alone, as in `opo_advantage()`."""
        parts = []
        for name, parameter in self.constants.items():
            default = parameter.default
            parts.append(name if default is parameter.empty else f"{name}={default!r}")
        return f"{self.name}({', '.join(parts)})"

    @property
    def needs(self) -> tuple[str, ...]:
        found = getattr(self.target, "needs", ())
        return found if isinstance(found, tuple) else getattr(self.target, "extra", ())

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring."""
        first, *_ = (inspect.getdoc(self.target) or "").split("\n\n")
        return " ".join(first.split())


REGISTRY: Mapping[str, RegistryEntry] = {
    target.__name__: RegistryEntry(target.__name__, kind, target)
    for kind, targets in _BY_KIND.items()
    for target in targets
}

# Where each kind belongs.
_TAKEN_BY: Mapping[Kind, str] = {
    "loss": "flow.train of a policy",
    "correction": "corrected(loss, correction)",
    "value_loss": 'flow.train of a critic (head="value")',
    "score_loss": 'flow.train of a reward model (head="score")',
    "group_advantage": "flow.per_group",
    "batch_advantage": "flow.per_batch",
    "token_advantage": 'flow.per_batch(..., per="token")',
    "aggregation": "flow.train(aggregation=...)",
    "kl_control": "flow.control",
}

# What a parameter's annotation takes: another of the registry, or literals.
_NESTED: Mapping[str, Kind] = {
    "LossFn": "loss",
    "Correction": "correction",
    "GroupAdvantage": "group_advantage",
}
_LITERALS: Mapping[str, tuple[type, ...]] = {
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "int": (int,),
    "bool": (bool,),
}


def parse(text: str, *kinds: Kind) -> Any:
    """What `text` names, of one of these kinds: "gspo", "gspo(3e-4, 4e-4)",
    "with_kl(cispo(5.0), 'k3', 0.001)".

    Raises ValueError with the text, what is wrong with it and what is known.
    """
    for kind in kinds:
        if kind not in get_args(Kind):
            raise ValueError(f"kind={kind!r} is unknown; use one of {', '.join(get_args(Kind))}.")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        _refuse(text, "it is no name with arguments", kinds)
    return _object(tree, kinds, text)


def names(*kinds: Kind) -> list[str]:
    return [entry.name for entry in REGISTRY.values() if entry.kind in kinds]


def kind_of(given: object) -> Kind | None:
    """Of one of these objects; None for one of the user's own."""
    while isinstance(given, functools.partial):
        given = given.func
    entry = _entry_of(given)
    return None if entry is None else entry.kind


def check_kind(caller: str, given: object, what: str, kinds: Sequence[Kind]) -> None:
    """Raise ValueError for one of these objects that stands, as the caller's `what`, where another
    kind is wanted, or holds one that does; objects of the user's own are any kind.
    """
    while isinstance(given, functools.partial):
        given = given.func
    entry = _entry_of(given)
    if entry is None:
        return
    name = name_of(given)
    if entry.kind not in kinds:
        raise InvalidValue(
            f"{caller}: {what}",
            name,
            rule=f"has the kind {entry.kind}, not {' or '.join(kinds)}",
            fix=f"Use one such as {names(kinds[0])[0]}, and give {entry.name} to "
            f"{_TAKEN_BY[entry.kind]}.",
        )
    if entry.is_made and given is entry.target:
        raise InvalidValue(
            f"{caller}: {what}", name, rule="lacks its arguments", fix=f"Give {name}(...)."
        )
    for field, parameter in inspect.signature(entry.target).parameters.items():
        if (kind := _NESTED.get(parameter.annotation)) is not None:
            check_kind(name, getattr(given, field), field, [kind])


def works_along_rollouts(given: object) -> bool:
    """Whether it is one of these functions over tokens that must know whose they are."""
    while isinstance(given, functools.partial):
        given = given.func
    entry = _entry_of(given)
    return entry is not None and "row_offsets" in inspect.signature(entry.target).parameters


def comes_with_rlsys(given: object) -> bool:
    return kind_of(given) is not None


def tables() -> str:
    """Markdown: a table per kind, in the order of the registry."""
    lines = []
    for kind in get_args(Kind):
        lines += [f"### {kind}", "", "| Name | What it is | Needs |", "|---|---|---|"]
        for name in names(kind):
            entry = REGISTRY[name]
            summary = entry.summary.replace("|", "\\|")
            needs = ", ".join(f"`{column}`" for column in entry.needs)
            lines.append(f"| `{entry.signature}` | {summary} | {needs} |")
        lines.append("")
    return "\n".join(lines)


def _entry_of(given: object) -> RegistryEntry | None:
    """What of this page it is, or was made of; None for an object of the user's own."""
    target = given if inspect.isfunction(given) or inspect.isclass(given) else type(given)
    entry = REGISTRY.get(target.__name__)
    return entry if entry is not None and entry.target is target else None


def _object(tree: ast.expr, kinds: Sequence[Kind], text: str) -> Any:
    match tree:
        case ast.Name(id=name):
            arguments: list[ast.expr] = []
            keywords: list[ast.keyword] = []
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            pass
        case _:
            _refuse(text, f"{ast.unparse(tree)} is no name with arguments", kinds)
    entry = REGISTRY.get(name)
    if entry is None:
        _refuse(text, f"{name!r} is unknown", kinds, name)
    if entry.kind not in kinds:
        _refuse(text, f"{name!r} is {_an(entry.kind)}", kinds)
    bound = _bind(entry, arguments, keywords, text)
    given = {
        argument: _argument(value, entry.constants[argument], entry, text)
        for argument, value in bound.items()
    }
    if entry.is_made:
        try:
            return entry.target(**given)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from error
    return functools.partial(entry.target, **given) if given else entry.target


def _bind(
    entry: RegistryEntry, arguments: list[ast.expr], keywords: list[ast.keyword], text: str
) -> dict[str, ast.expr]:
    """Arguments by the names of the parameters."""
    signature = inspect.Signature(list(entry.constants.values()))
    named: dict[str, ast.expr] = {}
    for keyword in keywords:
        name = keyword.arg or "**"
        if name in named:
            raise ValueError(f"{text!r} gives {name} twice; write {entry.written}.")
        named[name] = keyword.value
    try:
        return signature.bind(*arguments, **named).arguments
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}; write {entry.written}.") from None


def _argument(tree: ast.expr, parameter: inspect.Parameter, entry: RegistryEntry, text: str) -> Any:
    if parameter.annotation in _NESTED:
        return _object(tree, [_NESTED[parameter.annotation]], text)
    types = _LITERALS.get(parameter.annotation, (str,))
    try:
        value = ast.literal_eval(tree)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        value = math.inf if ast.unparse(tree) == "inf" else NotImplemented
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(
            f"{text!r}: {parameter.name}={ast.unparse(tree)} is no {parameter.annotation}; write "
            f"{entry.written}."
        )
    if parameter.name == "epsilon" and not (isinstance(value, float | int) and 0 <= value <= 1):
        raise ValueError(
            f"{text!r}: epsilon={ast.unparse(tree)} lies outside 0 to 1; it is added to a standard "
            "deviation, so that a large one makes all advantages small, and one below 0 turns them "
            "round. Use a small number, such as 1e-4."
        )
    return value


def _refuse(text: str, problem: str, kinds: Sequence[Kind], name: str = "") -> NoReturn:
    known = names(*kinds)
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? Known" if close else "known"
    raise ValueError(
        f"{text!r}: {problem}, where {_an(' or '.join(kinds))} is wanted; {meant}: "
        f"{', '.join(known)}."
    )


def _an(kind: str) -> str:
    return f"{'an' if kind[0] == 'a' else 'a'} {kind}"


if __name__ == "__main__":
    print(tables(), end="")
