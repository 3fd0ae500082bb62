"""Attributes of a loss that contains another loss."""

from __future__ import annotations

from typing import ClassVar

from rlsys.algorithms.loss_inputs import (
    LossFn,
    candidates_of,
    needs_of,
    of_pairs,
    uses_advantages,
    whole_groups,
)
from rlsys.common.user_functions import attribute_of, name_of
from rlsys.errors import NOT_GIVEN, require


class Wrapper:
    """Base of losses around `loss`, with its attributes unless a subclass overrides them.

    `extra` has the columns that the subclass itself needs.
    """

    loss: LossFn
    extra: ClassVar[tuple[str, ...]] = ()

    @property
    def denominator(self) -> str:
        """Return the policy that the loss divides by (losses.py)."""
        return denominator_of(self.loss)

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the columns that the loss reads."""
        return union(needs_of(self.loss), self.extra)

    @property
    def uses_advantages(self) -> bool:
        """Return whether the loss reads the advantages."""
        return uses_advantages(self.loss)

    @property
    def whole_groups(self) -> bool:
        """Return whether a micro-batch must have all rows of a group."""
        return whole_groups(self.loss)

    @property
    def interpolates_proximal(self) -> bool:
        """Return whether the loss computes π_prox itself, so that it needs no forward pass."""
        return getattr(self.loss, "interpolates_proximal", False)

    @property
    def of_pairs(self) -> bool:
        """Return whether each token has the loss of its pair."""
        return of_pairs(self.loss)

    @property
    def candidates(self) -> str | None:
        """Return the name of the column with candidate tokens, if any."""
        return candidates_of(self.loss)


# Values of `denominator`; only interpolate_proximal (composed.py) has "interpolated".
DENOMINATORS = ("sampler", "proximal", "none", "interpolated")


def denominator_of(loss: LossFn) -> str:
    """Return the policy that a loss divides by.

    Raises:
        InvalidValue: Its attribute `denominator` is missing or unknown.
    """
    denominator: str = attribute_of(loss, "denominator", NOT_GIVEN)
    require(
        denominator in DENOMINATORS,
        f"{name_of(loss)}: denominator",
        denominator,
        rule="must name the policy that the loss divides by, or a weight on it may count twice",
        fix='Set it to "sampler", "proximal", or "none" for a loss without a ratio.',
    )
    return denominator


def union(*names: tuple[str, ...]) -> tuple[str, ...]:
    """Return all names in their order, each once."""
    return tuple(dict.fromkeys(name for some in names for name in some))
