"""Settings that algorithms with GRPO's clipped loss share."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.config import RunConfig
from rlsys.errors import require


@dataclass(frozen=True, kw_only=True)
class ClippedConfig(RunConfig):
    """Settings of a loss clipped around a ratio of 1."""

    clip_low: float = 0.2
    """Tokens with a negative advantage stop being trained below a ratio of 1 - clip_low."""
    clip_high: float = 0.28
    """Tokens with a positive advantage stop being trained above a ratio of 1 + clip_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clips(self.clip_low, self.clip_high)


def check_clips(clip_low: float, clip_high: float) -> None:
    """Raise an InvalidValue unless 1 is inside of the clipped range."""
    fix = "Use 0 < clip_low < 1 and clip_high > 0."
    require(0 < clip_low < 1, "clip_low", clip_low, rule="must be between 0 and 1", fix=fix)
    require(clip_high > 0, "clip_high", clip_high, rule="must be positive", fix=fix)


def check_clip_and_kl(clip: float, kl_coefficient: float) -> None:
    """Raise an InvalidValue for a clip or a KL penalty out of range."""
    require(0 < clip < 1, "clip", clip, rule="must be between 0 and 1", fix="Use 0 < clip < 1.")
    require(
        kl_coefficient >= 0,
        "kl_coefficient",
        kl_coefficient,
        rule="a negative penalty rewards leaving the reference",
        fix="Use 0 for no penalty.",
    )


if __name__ == "__main__":
    raise SystemExit(
        "recipes/clips.py is part of other recipes. Run one of them, such as "
        "`python recipes/dapo.py`."
    )
