"""Names of the functions and classes of this package, for command lines and files, and as tables.

In: text such as `corrected(clipped_surrogate(0.2, 0.28, denominator="proximal"), tis(2.0))`, and
the kinds that it may have. Out: that object. The text may contain only registered names, numbers,
strings, True, False and None; nothing is evaluated as Python.

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
from rlsys.errors import InvalidValue, require

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
    """Registered function or class."""

    name: str
    kind: Kind
    target: Callable[..., Any]

    @property
    def is_factory(self) -> bool:
        """Return whether `target` is a class or function that returns the object for the graph.

        If not, `target` is itself the function that the graph calls.
        """
        return inspect.isclass(self.target) or self.kind == "loss"

    @property
    def constants(self) -> dict[str, inspect.Parameter]:
        """Return the parameters that text can set: no tensors."""
        return {
            name: parameter
            for name, parameter in inspect.signature(self.target).parameters.items()
            if self.is_factory
            or (parameter.kind is parameter.KEYWORD_ONLY and parameter.annotation in _LITERALS)
        }

    @property
    def signature(self) -> str:
        """Return such as `gspo(clip_low=0.0003, clip_high=0.0004, denominator='sampler')`."""
        return self._signature(inspect.signature(self.target).parameters)

    @property
    def usage(self) -> str:
        """Return the signature as text can use it: only the constants, as in `opo_advantage()`."""
        return self._signature(self.constants)

    def _signature(self, parameters: Mapping[str, inspect.Parameter]) -> str:
        parts = [
            name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"
            for name, parameter in parameters.items()
        ]
        return f"{self.name}({', '.join(parts)})"

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the columns that the object needs, without those of its arguments."""
        found = getattr(self.target, "needs", ())
        return found if isinstance(found, tuple) else getattr(self.target, "extra", ())

    @property
    def summary(self) -> str:
        """Return the first paragraph of the docstring, without a leading "Return"."""
        first, *_ = (inspect.getdoc(self.target) or "").split("\n\n")
        return " ".join(first.split()).removeprefix("Return ")


REGISTRY: Mapping[str, RegistryEntry] = {
    target.__name__: RegistryEntry(target.__name__, kind, target)
    for kind, targets in _BY_KIND.items()
    for target in targets
}

# The method or argument that takes each kind.
_USED_BY: Mapping[Kind, str] = {
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

# By a parameter's annotation: the kind of a registered object, or types of literals.
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
    """Return the object that `text` names.

    Args:
        text: Such as "gspo", "gspo(3e-4, 4e-4)" or "with_kl(cispo(5.0), 'k3', 0.001)".
        kinds: Kinds that the object may have.

    Raises:
        InvalidValue: The text is not a registered name with valid arguments.
    """
    for kind in kinds:
        require(
            kind in get_args(Kind),
            "kind",
            kind,
            rule="is unknown",
            fix=f"Use one of {', '.join(get_args(Kind))}.",
        )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        _refuse(text, "the text is not a name with arguments", kinds)
    return _object(tree, kinds, text)


def names(*kinds: Kind) -> list[str]:
    """Return the registered names of these kinds."""
    return [entry.name for entry in REGISTRY.values() if entry.kind in kinds]


def kind_of(given: object) -> Kind | None:
    """Return the kind of a registered object, or None for a user's own."""
    entry = _entry_of(given)
    return None if entry is None else entry.kind


def check_kind(caller: str, given: object, argument: str, kinds: Sequence[Kind]) -> None:
    """Check that `given`, the caller's `argument`, and the objects in it have a fitting kind.

    A user's own objects fit any kind.

    Raises:
        InvalidValue: A registered object has another kind, or is a class instead of an object.
    """
    entry = _entry_of(given)
    if entry is None:
        return
    given = _unwrapped(given)
    name, field = name_of(given), f"{caller}: {argument}"
    require(
        entry.kind in kinds,
        field,
        given,
        rule=f"{name} is {_an(entry.kind)}, not {_an(' or '.join(kinds))} such as "
        f"{names(kinds[0])[0]}",
        fix=f"Pass {entry.name} to {_USED_BY[entry.kind]}.",
    )
    require(
        not entry.is_factory or given is not entry.target,
        field,
        given,
        rule=f"{name} is a class or factory, not {_an(entry.kind)}",
        fix=f"Create one: {name}(...).",
    )
    for parameter_name, parameter in inspect.signature(entry.target).parameters.items():
        if (kind := _NESTED.get(parameter.annotation)) is not None:
            check_kind(name, getattr(given, parameter_name), parameter_name, [kind])


def needs_row_offsets(given: object) -> bool:
    """Return whether `given` is a registered function over tokens that needs their rollouts."""
    entry = _entry_of(given)
    return entry is not None and "row_offsets" in inspect.signature(entry.target).parameters


def comes_with_rlsys(given: object) -> bool:
    """Return whether `given` is a registered object."""
    return kind_of(given) is not None


def tables() -> str:
    """Return a Markdown table for each kind, in the order of the registry."""
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
    """Return the entry of a registered object or of its class; None for a user's own object."""
    given = _unwrapped(given)
    target = given if inspect.isfunction(given) or inspect.isclass(given) else type(given)
    entry = REGISTRY.get(target.__name__)
    return entry if entry is not None and entry.target is target else None


def _unwrapped(given: object) -> object:
    while isinstance(given, functools.partial):
        given = given.func
    return given


def _object(tree: ast.expr, kinds: Sequence[Kind], text: str) -> Any:
    match tree:
        case ast.Name(id=name):
            arguments: list[ast.expr] = []
            keywords: list[ast.keyword] = []
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            pass
        case _:
            _refuse(text, f"{ast.unparse(tree)} is not a name with arguments", kinds)
    entry = REGISTRY.get(name)
    if entry is None:
        _refuse(text, f"{name!r} is unknown", kinds, name)
    if entry.kind not in kinds:
        _refuse(text, f"{name!r} is {_an(entry.kind)}", kinds)
    bound = _bind(entry, arguments, keywords, text)
    values = {
        argument: _argument(value, entry.constants[argument], entry, text)
        for argument, value in bound.items()
    }
    if entry.is_factory:
        try:
            return entry.target(**values)
        except InvalidValue as error:
            raise error.within(f"{text!r}: ") from error
    return functools.partial(entry.target, **values) if values else entry.target


def _bind(
    entry: RegistryEntry, arguments: list[ast.expr], keywords: list[ast.keyword], text: str
) -> dict[str, ast.expr]:
    """Return the arguments by parameter name."""
    signature = inspect.Signature(list(entry.constants.values()))
    named: dict[str, ast.expr] = {}
    for keyword in keywords:
        name = keyword.arg or "**"
        if name in named:
            raise InvalidValue(
                repr(text), rule=f"{name} is there twice", fix=f"Write {entry.usage}."
            )
        named[name] = keyword.value
    try:
        return signature.bind(*arguments, **named).arguments
    except TypeError as error:
        raise InvalidValue(repr(text), rule=str(error), fix=f"Write {entry.usage}.") from None


def _argument(tree: ast.expr, parameter: inspect.Parameter, entry: RegistryEntry, text: str) -> Any:
    if parameter.annotation in _NESTED:
        return _object(tree, [_NESTED[parameter.annotation]], text)
    types = _LITERALS.get(parameter.annotation, (str,))
    try:
        value = ast.literal_eval(tree)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        value = math.inf if ast.unparse(tree) == "inf" else NotImplemented
    field = f"{text!r}: {entry.name}: {parameter.name}"
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise InvalidValue(
            field,
            ast.unparse(tree) if value is NotImplemented else value,
            rule=f"must be {_an(parameter.annotation)}",
            fix=f"Write {entry.usage}.",
        )
    if parameter.name == "epsilon" and isinstance(value, float | int):
        require(
            0 <= value <= 1,
            field,
            value,
            rule="must be from 0 to 1, since it is added to a standard deviation",
            fix="Use a small number such as 1e-4.",
        )
    return value


def _refuse(text: str, problem: str, kinds: Sequence[Kind], name: str = "") -> NoReturn:
    known = names(*kinds)
    close = difflib.get_close_matches(name, known, n=1)
    suggestion = f"Did you mean {close[0]!r}? " if close else ""
    raise InvalidValue(
        repr(text),
        rule=f"{problem}; {_an(' or '.join(kinds))} is needed",
        fix=f"{suggestion}Use one of {', '.join(known)}.",
    )


def _an(kind: str) -> str:
    return f"{'an' if kind[0] == 'a' else 'a'} {kind}"


if __name__ == "__main__":
    print(tables(), end="")
