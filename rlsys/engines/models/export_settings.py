"""Files of an export other than its weights: configuration, generation settings and tokenizer.

    model.path ─► check_exportable, before a run starts ─► warnings, or InvalidValue
    trained model ─► save_settings, at its export        ─► files

transformers loads some settings that it refuses to save, such as a temperature without do_sample.
The export repairs these, and a warning at the start of a run says how.
"""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

from rlsys.data.hub import in_short, unreadable
from rlsys.errors import InvalidValue

# Settings that are kept if no other repair works.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "top_h")


def save_settings(
    config: Any, generation: Any | None, tokenizer: Any, directory: str | Path
) -> None:
    """Write the files that from_pretrained reads in addition to the weights.

    `generation` is None for a model that does not generate. Settings that cannot be saved are
    repaired: see `exportable`.
    """
    config.save_pretrained(directory)
    if generation is not None:
        exportable(generation)[0].save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def exportable(generation: Any) -> tuple[Any, list[str]]:
    """Return generation settings that transformers saves, and the changes that this needed."""
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
    """Turn sampling on if sampling settings are present: their author intended to use them."""
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
        path: Directory or hub name of the model.
        config: Configuration of the model.
        tokenizer: Tokenizer of the model.
        generates: The model has generation settings.
        setting: Name of the option that gives `path`.

    Returns:
        Warnings about settings that an export changes.

    Raises:
        InvalidValue: Settings cannot be read, or cannot be saved.
    """
    from transformers import GenerationConfig

    generation: Any = None
    changes: list[str] = []
    try:
        if generates:
            try:
                generation = GenerationConfig.from_pretrained(path)
            except OSError:  # no such file: the model derives the settings from its configuration
                generation = GenerationConfig.from_model_config(config)
            changes = exportable(generation)[1]
        with tempfile.TemporaryDirectory(prefix="rlsys-") as directory:
            save_settings(copy.deepcopy(config), generation, tokenizer, directory)
    except unreadable() as error:
        raise InvalidValue(
            setting,
            path,
            rule="configuration, generation_config.json or tokenizer cannot be saved again "
            f"({in_short(error)})",
            fix="Correct the files before you train the model.",
        ) from error
    return [f"{path}/generation_config.json: the export has {change}" for change in changes]
