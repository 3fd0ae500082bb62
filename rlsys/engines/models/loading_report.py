"""Checks that a checkpoint's tensors match the model that its config.json describes.

transformers initializes missing weights at random and ignores unexpected ones. Either way the
loaded model would differ from the one that was saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from rlsys.engines.models.lazy_tensors import LazyTensor, sources
from rlsys.errors import InvalidValue, require

NUM_SHOWN = 3

# Arguments of from_pretrained that make it return the report for check_report.
REPORTED: Mapping[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}


@contextmanager
def no_printed_report() -> Iterator[None]:
    """Silence transformers' table of missing and unexpected weights."""
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
    """Raise InvalidValue unless a checkpoint's tensors match the model's layers and shapes.

    `report` comes from `from_pretrained(..., **REPORTED)`. Weights in `may_lack` may be missing.
    Extra weights outside the model's layers are accepted, such as image towers or other heads.
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
        *_list_names(lacking, "missing"),
        *_list_names(beyond, "unexpected"),
        *_list_names(misshapen, "wrong shapes"),
    ]
    require(
        not problems,
        "model.path",
        str(path),
        rule=f"the files are not those of the {type(model).__name__} that config.json describes: "
        f"{'; '.join(problems)}",
        fix="Give config.json and all weights of the same model.",
    )


def check_kinds(model: Any, path: str | Path) -> None:
    """Raise InvalidValue for lazy weights whose files hold integers or booleans."""
    for name, parameter in model.named_parameters():
        made_of = sources(parameter) if isinstance(parameter, LazyTensor) else []
        kinds = {one.dtype for one in made_of if not one.dtype.is_floating_point}
        if kinds and parameter.dtype.is_floating_point:
            raise InvalidValue(
                "model.path",
                str(path),
                rule=f"the files have {name} in {kinds.pop()}, and config.json gives no scale",
                fix="Give floating-point weights, or quantized ones with their "
                "quantization_config.",
            )


def _list_names(names: Sequence[str], problem: str) -> Iterator[str]:
    if names:
        others = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
        yield f"{problem} {', '.join(names[:NUM_SHOWN])}{others}"
