"""Whether a checkpoint's tensors are those of the model that its config.json describes.

transformers draws what a checkpoint lacks at random, and leaves out what the model does not have:
both compute another model than the one whose files they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from rlsys.engines.models.lazy_tensors import LazyTensor, sources

NUM_SHOWN = 3

# Of from_pretrained, for it to tell what check_report reads.
REPORTED: Mapping[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}


@contextmanager
def no_printed_report() -> Iterator[None]:
    """Transformers prints a table of what it did not find, and of what it did not need."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def check_report(
    model: Any, report: Mapping[str, Any], path: str | Path, *, may_lack: Collection[str] = ()
) -> None:
    """Raise ValueError, with the first names, unless the files had all that the model has, but for
    `may_lack`, in its shapes, and of its layers nothing else.

    `report`: what `from_pretrained(..., **REPORTED)` tells. What lies outside of the model's layers
    may be there: towers for images, other heads.
    """
    layers = tuple(
        f"{name}." for name, one in model.named_modules() if isinstance(one, nn.ModuleList)
    )
    lacking = sorted(set(report["missing_keys"]) - set(may_lack))
    beyond = sorted(name for name in report["unexpected_keys"] if name.startswith(layers))
    misshapen = [
        f"{name}: {tuple(shape)} instead of {tuple(wanted)}"
        for name, shape, wanted in sorted(report["mismatched_keys"])
    ]
    problems = [
        *_told(lacking, "the files lack"),
        *_told(beyond, "its layers have no"),
        *_told(misshapen, "other shapes have"),
    ]
    if problems:
        raise ValueError(
            f"model.path={str(path)!r}: the files are not those of the {type(model).__name__} that "
            f"config.json describes: {'; '.join(problems)}. Give config.json and weights of one "
            "model, and all files of it."
        )


def check_kinds(model: Any, path: str | Path) -> None:
    """Raise ValueError for weights that are promised out of whole numbers or truth values."""
    for name, parameter in model.named_parameters():
        made_of = sources(parameter) if isinstance(parameter, LazyTensor) else []
        kinds = {one.dtype for one in made_of if not one.dtype.is_floating_point}
        if kinds and parameter.dtype.is_floating_point:
            raise ValueError(
                f"model.path={str(path)!r}: the files have {name} in {kinds.pop()}, which "
                "config.json gives no scale for; weights are floating-point numbers, or quantised "
                "ones with the quantization_config that they were made with."
            )


def _told(names: Sequence[str], what: str) -> Iterator[str]:
    if names:
        others = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
        yield f"{what} {', '.join(names[:NUM_SHOWN])}{others}"
