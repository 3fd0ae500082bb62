"""A Hugging Face checkpoint of the trained policy, with its tokenizer.

    tensors of the model ─► lazy tensors ─► names and shapes of a checkpoint ─► files of some GB
    file by file: gather its sources on rank 0 ─► make its tensors ─► write, and free

Rank 0 never holds more than the tensors of one file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlsys.common.atomic_directory import new_directory
from rlsys.common.safe_json import dump_json
from rlsys.engines.models.causal_lm import disk_errors_as_oserror
from rlsys.engines.models.export_settings import save_settings
from rlsys.engines.models.lazy_tensors import Index, LazyTensor, sources
from rlsys.engines.training.ranks import Ranks

FILE_BYTES = 5 * 10**9  # only a group of tensors that are converted together may exceed it

Fact = tuple[torch.dtype, Sequence[int]]  # precision in the checkpoint, shape


def export_model(
    model: Any,
    tensors: Mapping[str, Fact],
    gather: Callable[[str], torch.Tensor],
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    tokenizer_path: str | Path,
    directory: Path,
    extras: Sequence[Callable[[Path], None]] = (),
) -> None:
    """Write a checkpoint, replacing `directory` as a whole or not at all. A collective.

    `tensors` are all that `model_tensors` names; `gather`, a collective, brings one to rank 0.
    `dtype` is the default precision in the configuration. `extras` write further files.

    Raises OSError for an unwritable directory or a full disk, on rank 0 alone.
    """
    plan = ExportPlan(model, tensors)
    refused: OSError | None = None
    with ExitStack() as stack:
        unfinished: Path | None = None
        if ranks.rank == 0:
            try:
                unfinished = stack.enter_context(new_directory(directory))
            except OSError as error:
                refused = error
        for file in plan.files:
            if ranks.max(refused is not None):
                break
            for name in file.sources:
                gathered = gather(name)
                if unfinished is not None:
                    plan.gathered[name] = gathered.to("cpu", tensors[name][0])
            if unfinished is not None:
                try:
                    _write(unfinished / file.name, file.tensors)
                except OSError as error:
                    refused = error
            plan.gathered.clear()
        if refused is not None:
            raise refused
        if unfinished is not None:
            _write_settings(model, plan, dtype, tokenizer_path, unfinished)
            for write in extras:
                write(unfinished)


@dataclass
class File:
    """A file of a checkpoint, with its tensors by their names there."""

    name: str = ""
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)  # tensors of the model that it is made of

    @property
    def num_bytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class ExportPlan:
    """The tensors of each file, equal on every rank.

    `gathered` has the model's tensors that are on rank 0 now, by name.
    """

    def __init__(self, model: Any, tensors: Mapping[str, Fact]) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self.gathered: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        ignored = model._keys_to_ignore_on_save or ()
        lazy_tensors = {
            name: self._lazy(name, *fact) for name, fact in tensors.items() if name not in ignored
        }
        self.files = list(self._files(revert_weight_conversion(model, lazy_tensors)))
        for number, file in enumerate(self.files, 1):
            suffix = f"-{number:05d}-of-{len(self.files):05d}" if len(self.files) > 1 else ""
            file.name = f"model{suffix}.safetensors"

    def _lazy(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> LazyTensor:
        lazy = LazyTensor(shape, dtype, partial(self._part, name))
        self._names[id(lazy)] = name
        return lazy

    def _part(self, name: str, index: Index) -> torch.Tensor:
        return self.gathered[name][index]

    def _files(self, tensors: Mapping[str, LazyTensor]) -> Iterator[File]:
        file = File()
        for group in self._groups(tensors):
            if file.tensors and file.num_bytes + group.num_bytes > FILE_BYTES:
                yield file
                file = File()
            file.tensors |= group.tensors
            file.sources += group.sources
        yield file

    def _groups(self, tensors: Mapping[str, LazyTensor]) -> Iterator[File]:
        """Yield groups of neighbouring tensors that are made of the same sources."""
        group = File()
        for name, lazy in tensors.items():
            of = [self._names[id(source)] for source in sources(lazy)]
            if group.tensors and not set(of) & set(group.sources):
                yield group
                group = File()
            group.tensors[name] = lazy
            group.sources += [source for source in of if source not in group.sources]
        yield group


def _write(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    from safetensors.torch import save_file

    numbers = {name: lazy.read().contiguous() for name, lazy in tensors.items()}
    with disk_errors_as_oserror():
        save_file(numbers, path, metadata={"format": "pt"})


def _write_settings(
    model: Any, plan: ExportPlan, dtype: torch.dtype, tokenizer_path: str | Path, directory: Path
) -> None:
    from transformers import AutoTokenizer

    if len(plan.files) > 1:
        index = {
            "metadata": {"total_size": sum(file.num_bytes for file in plan.files)},
            "weight_map": {name: file.name for file in plan.files for name in file.tensors},
        }
        text = dump_json(index, indent=2, sort_keys=True)
        (directory / "model.safetensors.index.json").write_text(text + "\n")
    config = copy.deepcopy(model.config)  # its dtype is that of the float32 masters
    config.architectures, config.dtype = [type(model).__name__], dtype
    generation = model.generation_config if model.can_generate() else None
    save_settings(config, generation, AutoTokenizer.from_pretrained(tokenizer_path), directory)
