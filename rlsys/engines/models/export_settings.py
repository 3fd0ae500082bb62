"""Files of an export beside its weights: configuration, generation settings and tokenizer.

    model.path ─► check_exportable, before a run starts ─► warnings, or ValueError
    trained model ─► save_settings, at its export        ─► files

transformers loads settings that it refuses to save, such as a temperature without do_sample. These
are repaired at the export, and a run's start says how.
"""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

from rlsys.data.hub import in_short, unreadable

# Settings that are kept where all others cannot be saved.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "top_h")


def save_settings(
    config: Any, generation: Any | None, tokenizer: Any, directory: str | Path
) -> None:
    """Write the files that from_pretrained reads beside the weights.

    `generation`: of a model that generates, else None. Never refused: see `exportable`.
    """
    config.save_pretrained(directory)
    if generation is not None:
        exportable(generation)[0].save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def exportable(generation: Any) -> tuple[Any, list[str]]:
    """Return generation settings that transformers saves, and what was changed in them."""
    changes: list[str] = []
    fixed = copy.deepcopy(generation)
    for repair in (_sample, _unset_named, _keep_token_ids):
        if not (fault := _fault(fixed)):
            break
        fixed, change = repair(fixed, fault)
        if change:
            changes.append(change)
    return fixed, changes


def _fault(generation: Any) -> str:
    try:
        generation.validate(strict=True)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def _sample(generation: Any, fault: str) -> tuple[Any, str]:
    """Turn sampling on where settings of sampling are there: their author wanted them used."""
    if generation.do_sample is True or not any(f"`{name}`" in fault for name in SAMPLING):
        return generation, ""
    generation.do_sample = True
    return generation, "do_sample=True, without which its sampling settings cannot be saved"


def _unset_named(generation: Any, fault: str) -> tuple[Any, str]:
    names = re.findall(r"^- `(\w+)`", fault, re.MULTILINE)
    for name in names:
        setattr(generation, name, None)
    return generation, f"without {', '.join(names)}, which cannot be saved" if names else ""


def _keep_token_ids(generation: Any, fault: str) -> tuple[Any, str]:
    given = {name: getattr(generation, name, None) for name in TOKEN_IDS}
    kept = {name: one for name, one in given.items() if not (isinstance(one, int) and one < 0)}
    return type(generation)(**kept), f"its token ids alone ({fault.splitlines()[0]})"


def check_exportable(
    path: str, config: Any, tokenizer: Any, *, generates: bool, setting: str = "model.path"
) -> list[str]:
    """Save the settings of a model into a directory that is removed, as its export will.

    Args:
        path: Of the model, which `setting` gives.
        config: Its configuration.
        tokenizer: Its tokenizer.
        generates: Whether it has generation settings.

    Returns:
        Warnings about what an export changes.

    Raises:
        ValueError: For settings that cannot be read, or not be saved.
    """
    from transformers import GenerationConfig

    generation: Any = None
    changes: list[str] = []
    try:
        if generates:
            try:
                generation = GenerationConfig.from_pretrained(path)
            except OSError:  # there is none: the model makes one of its configuration
                generation = GenerationConfig.from_model_config(config)
            changes = exportable(generation)[1]
        with tempfile.TemporaryDirectory(prefix="rlsys-") as directory:
            save_settings(copy.deepcopy(config), generation, tokenizer, directory)
    except unreadable() as error:
        raise ValueError(
            f"{setting}={path!r}: its configuration, generation_config.json or tokenizer cannot be "
            f"exported again ({in_short(error)}). Correct the files before you train it."
        ) from error
    return [f"{path}/generation_config.json: the export has {change}" for change in changes]
