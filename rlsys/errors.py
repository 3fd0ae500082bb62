"""Errors that users see.

    InvalidValue    a mistake that the user can correct: an option, an argument, a file, a dataset
    InvalidValues   several mistakes, found by checks that do not depend on each other
    RunFailed       a failure while a run is under way

Any other exception is a bug of this project.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator
from typing import Any, Final

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 12
MAX_VALUE = 400  # characters of a value in a message


class _NotGiven:
    """The type of `NOT_GIVEN`."""

    def __repr__(self) -> str:
        return "NOT_GIVEN"

    def __reduce__(self) -> str:
        return "NOT_GIVEN"


NOT_GIVEN: Final = _NotGiven()


class InvalidValue(ValueError):
    """A mistake that the user can correct: an option, an argument, a file or a dataset.

    The message is `FIELD=VALUE: RULE. FIX`, or `FIELD: RULE. FIX` without a value.

    Attributes:
        field: Name of the option, argument, column or file, as the user writes it.
        value: The value that was given, or `NOT_GIVEN` if no value is at fault.
        rule: The rule that the value breaks, without a final period.
        fix: What the user can do, as a sentence.
    """

    def __init__(self, field: str, value: Any = NOT_GIVEN, *, rule: str, fix: str) -> None:
        super().__init__(field, value, rule, fix)
        self.field = field
        self.value = value
        self.rule = rule
        self.fix = fix

    def __str__(self) -> str:
        given = "" if self.value is NOT_GIVEN else f"={_short(self.value)}"
        return f"{self.field}{given}: {self.rule}. {self.fix}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.field, self.value, self.rule, self.fix)

    def within(self, prefix: str) -> InvalidValue:
        """Return the same error about the field `prefix` + `field`."""
        return type(self)(f"{prefix}{self.field}", self.value, rule=self.rule, fix=self.fix)


class InvalidValues(InvalidValue):
    """Several mistakes at once. The attributes are those of the first one.

    Attributes:
        errors: The mistakes, in the order in which they were found.
    """

    def __init__(self, errors: tuple[ValueError, ...]) -> None:
        first = errors[0]
        if isinstance(first, InvalidValue):
            super().__init__(first.field, first.value, rule=first.rule, fix=first.fix)
        else:
            super().__init__("", rule=str(first), fix="")
        self.errors = errors

    def __str__(self) -> str:
        lines = "".join(f"\n  - {error}" for error in self.errors)
        return f"{len(self.errors)} mistakes:{lines}"

    def within(self, prefix: str) -> InvalidValues:
        """Return the same errors about fields that begin with `prefix`."""
        return InvalidValues(
            tuple(e.within(prefix) if isinstance(e, InvalidValue) else e for e in self.errors)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return InvalidValues, (self.errors,)


class RunFailed(RuntimeError):
    """A run ended before its last step. The message gives the reason; the run directory is kept."""


class ErrorCollector:
    """Collects mistakes, so that the user sees all of them at once.

    Each check that does not depend on others runs in its own `collect` block. `raise_found` then
    raises what the checks found.
    """

    def __init__(self) -> None:
        self._found: list[ValueError] = []

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Record a ValueError that the block raises, and go on after the block."""
        try:
            yield
        except InvalidValues as several:
            for error in several.errors:
                self._add(error)
        except ValueError as error:
            self._add(error)

    def _add(self, error: ValueError) -> None:
        if str(error) not in map(str, self._found):
            self._found.append(error)

    def raise_found(self) -> None:
        """Raise the mistake that was found, or `InvalidValues` if there are several.

        Raises:
            ValueError: At least one check failed.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise InvalidValues(tuple(self._found))


def require(holds: bool, field: str, value: Any = NOT_GIVEN, *, rule: str, fix: str) -> None:
    """Raise an InvalidValue unless `holds`.

    Raises:
        InvalidValue: `holds` is false.
    """
    if not holds:
        raise InvalidValue(field, value, rule=rule, fix=fix)


def first_error(error: BaseException) -> BaseException:
    """Return the error of an exception group that ended the others.

    An error that is not a group is returned as it is.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _restore(kind: type[InvalidValue], field: str, value: Any, rule: str, fix: str) -> InvalidValue:
    return kind(field, value, rule=rule, fix=fix)


def _short(value: Any) -> str:
    """Return the repr of a value in at most MAX_VALUE characters."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."
