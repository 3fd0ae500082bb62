"""State of a recipe that is started with --plan: what was asked, and the settings that were found.

    first call of the recipe   parse (keeps the request) ─► launch plans the run, raises PlanFound
    second call of the recipe  parse (adds the settings) ─► launch runs it

`rlsys.main` opens the session and makes both calls, so that a recipe builds its graph from the
planned configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlsys.errors import require

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
    """

    mode: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] | None = None
    planning: Any = None

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
_given = GivenOptions()  # of the command line that was read last
_unserved = ""  # value of --plan that was read outside of a session


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
    global _unserved
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
        _unserved = wanted
        return {}
    session.mode, session.given = wanted, given
    return (session.settings or {}) if wanted else {}


def check_served() -> None:
    """Raise an InvalidValue if --plan was read, and nothing will plan the run."""
    require(
        current_session() is not None or not _unserved,
        "--plan",
        _unserved,
        rule="needs a main function with the decorator rlsys.main",
        fix="Decorate the function that calls rlsys.parse and rlsys.launch.",
    )
