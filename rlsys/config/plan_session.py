"""Options of a command line that are not part of the configuration: --dry-run and --plan.

`parse` keeps them here and `launch` reads them, so a recipe need not pass them on. With --plan:

    first call of the recipe   parse (keeps the request) ─► launch plans the run, raises PlanFound
    second call of the recipe  parse (adds the settings) ─► launch runs it

`rlsys.main` opens the session and makes both calls, so that a recipe builds its graph from the
planned configuration.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlsys.config.fields import leaves
from rlsys.errors import require

STALENESS: Final = "asynchrony.max_staleness"
UPDATES: Final = ("trainer.num_minibatches", "trainer.num_epochs")  # of a step: their product

AUTO: Final = "auto"
AGAIN: Final = "again"


class PlanFound(BaseException):
    """Raised by `launch` when a run was planned. Not an Exception: recipes must not catch it."""


@dataclass(kw_only=True)
class PlanSession:
    """A start of a recipe.

    Attributes:
        mode: Value of --plan, or "" without the option.
        given: Options of the command line, by dotted name.
        settings: Settings of the plan, once there is one.
        planning: The planner's answer, if the run was planned now.
        dry_run: Value of --dry-run, None before the first call of `parse`.
    """

    mode: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] | None = None
    planning: Any = None
    dry_run: bool | str | None = None

    @property
    def must_plan(self) -> bool:
        """True if `launch` has to plan."""
        return bool(self.mode) and self.settings is None


@dataclass(frozen=True, kw_only=True)
class GivenOptions:
    """Options of a recipe by dotted name: those of its command line, and those of its file."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    file: Mapping[str, Any] = field(default_factory=dict)


_session: PlanSession | None = None
_is_requested = False  # by `rlsys plan`
_given = GivenOptions()  # of the command line that was read last
_outside = PlanSession()  # options that were read outside of a session


@contextlib.contextmanager
def plan_session() -> Iterator[PlanSession]:
    """Open a session for the block."""
    global _session
    before, _session = _session, PlanSession()
    try:
        yield _session
    finally:
        _session = before


def current_session() -> PlanSession | None:
    """Return the session of this process; None outside of `rlsys.main`."""
    return _session


def request_plan(is_requested: bool) -> None:
    """Keep whether `rlsys plan` wants a plan of the run instead of the run."""
    global _is_requested
    _is_requested = is_requested


def is_plan_requested() -> bool:
    """Return whether `rlsys plan` wants a plan of the run instead of the run."""
    return _is_requested


def open_for_plan(
    cls: type[Any], values: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a bound of staleness that the updates of a step allow, if a plan chooses the bound.

    Otherwise the result is empty, and the bound is checked: without a plan, and if the command line
    has the bound.

    Args:
        cls: Class of the configuration.
        values: Values by dotted name, besides the defaults of the class.
        arguments: Those of the command line.
    """
    session = current_session()
    is_planned = _is_requested or (session is not None and session.must_plan)
    if not is_planned or STALENESS in arguments:
        return {}
    found = {leaf.name: leaf.default for leaf in leaves(cls)} | dict(values)
    given = [found.get(name) for name in (STALENESS, *UPDATES)]
    numbers = [one for one in given if type(one) is int]
    if len(numbers) < len(given):
        return {}  # the class has no such field, or a value of another type is refused later
    bound, *factors = numbers
    return {STALENESS: max(bound, math.prod(factors) - 1)}


def given_options() -> GivenOptions:
    """Return the options of the command line that this process read last, for `rlsys plan`."""
    return _given


def keep_options(arguments: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    """Keep the options of a command line and of its file for `given_options`."""
    global _given
    _given = GivenOptions(arguments=arguments, file=file)


def planned_settings(mode: str | None, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep the request of a command line and return the settings that were found for it so far.

    Raises:
        InvalidValue: --plan has another value.
    """
    wanted = "" if mode in (None, "none") else str(mode)
    require(
        wanted in ("", AUTO, AGAIN),
        "--plan",
        mode,
        rule="must be auto, again or none",
        fix="Use auto to plan a run for its cluster.",
    )
    session = current_session()
    if session is None:
        _outside.mode = wanted
        return {}
    _outside.mode = ""
    session.mode, session.given = wanted, given
    return (session.settings or {}) if wanted else {}


def check_served() -> None:
    """Raise an InvalidValue if --plan was read, and nothing will plan the run."""
    require(
        not _outside.mode,
        "--plan",
        _outside.mode,
        rule="must be read in a main function with the decorator rlsys.main",
        fix="Decorate the function that calls rlsys.parse and rlsys.launch.",
    )


def keep_dry_run(dry_run: bool | str) -> None:
    """Keep the value of --dry-run for `launch`.

    In a session, which is one start of a recipe, a dry run remains one if options are read again.
    """
    session = current_session()
    if session is None:
        _outside.dry_run = dry_run
    else:
        session.dry_run = session.dry_run or dry_run


def requested_dry_run(argument: bool | str | None) -> bool | str:
    """Return the dry run that a call of `launch` is: its argument, or by default what was parsed.

    Raises:
        InvalidValue: The argument asks for a run, and the command line for a dry run.
    """
    session = current_session()
    if session is None or session.dry_run is None:
        session = _outside
    parsed = session.dry_run or False
    require(
        argument is not False or not parsed,
        "launch: dry_run",
        argument,
        rule=f"the options that rlsys.parse read ask for a dry run ({parsed})",
        fix="Leave out the argument, or parse other options first.",
    )
    return parsed if argument is None or (argument is True and parsed) else argument
