"""What the algorithms around GRPO's clipped loss have in common: the clips, and groups."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.config import RunConfig, require


@dataclass(frozen=True, kw_only=True)
class ClippedConfig(RunConfig):
    """Of advantages within groups, and a loss clipped around a ratio of 1."""

    clip_low: float = 0.2
    """Tokens with a negative advantage stop being trained below a ratio of 1 - clip_low."""
    clip_high: float = 0.28
    """Tokens with a positive advantage stop being trained above a ratio of 1 + clip_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.group_size >= 2,
            f"group_size={self.group_size} makes every GRPO advantage zero; use group_size >= 2.",
        )
        require(
            0 < self.clip_low < 1 and self.clip_high > 0,
            f"clip_low={self.clip_low}, clip_high={self.clip_high} leave no range around 1; use "
            "0 < clip_low < 1 and clip_high > 0.",
        )


if __name__ == "__main__":
    raise SystemExit(
        "recipes/clips.py is a part of other recipes. Run one of them, such as "
        "`python recipes/dapo.py`."
    )
