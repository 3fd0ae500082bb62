"""A problem of a run, which the console and the report page show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Line = Mapping[str, float]  # metrics of a step
Lines = Sequence[Line]


@dataclass(frozen=True)
class Finding:
    """A problem, with its cause and its fix, both as sentences."""

    kind: str  # the same finding on later steps has the same kind
    cause: str
    fix: str
    topic: str = ""  # of kinds that contradict each other, or empty

    @property
    def message(self) -> str:
        """Return the text for the console."""
        return f"{self.cause}. {self.fix}"
