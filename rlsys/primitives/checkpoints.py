"""What is saved, under which name, and where.

    tinker://MODEL/weights/NAME           a trainer's state: parameters and moments
    tinker://MODEL/sampler_weights/NAME   what a sampler needs: adapters, or a whole model

lie in DIRECTORY/MODEL/weights/NAME and so on, each with a `saved.json` that says what it is of, and
a manifest.json with the checksums of its files. A directory appears whole or not at all. NAME is
the client's, or one that says the number of optimizer steps; MODEL is the model's id with "." in
the place of ":".
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rlsys.json_text import dump_json, parse_json
from rlsys.manifest import faults_of, write_manifest
from rlsys.primitives.errors import Refused

Kind = Literal["weights", "sampler_weights"]

SCHEME = "tinker://"
SAVED = "saved.json"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_:-]{0,199}")  # without ".", which stands for ":"


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """Of what something was saved. `lora`: the adapters, as model.lora names them; "" for all
    weights. `version`: optimizer steps behind it."""

    base_model: str
    lora: str
    version: int


@dataclass(frozen=True, kw_only=True)
class SamplerWeights:
    """Weights that a sampler can take. `number`: what tokens that they sampled carry, one for each
    that this server has saved or read; 0 for those of base models."""

    base_model: str
    number: int = 0
    path: str = ""  # tinker://...; "": of the base model itself
    model: str = ""  # that was trained
    directory: Path | None = None
    version: int = 0  # optimizer steps behind them

    @property
    def key(self) -> str:
        return self.path or self.base_model

    @property
    def label(self) -> str:
        """What a sampled sequence says of its weights."""
        return self.path or "base"


class Checkpoints:
    """Of one server, below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, model: str, kind: Kind, name: str) -> str:
        """Raises Refused for a name that is no name of a directory."""
        if not _NAME.fullmatch(name):
            raise Refused(
                f"{name!r} is no name of a checkpoint; use letters, digits, '.', '_' and '-', at "
                "most 200."
            )
        return f"{SCHEME}{model}/{kind}/{name}"

    def parse(self, path: str, kind: Kind) -> tuple[str, Path]:
        """The model and the directory of a path of this kind, which must be there. Raises
        Refused."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] != kind:
            raise Refused(
                f"{path!r} names no {kind}; give a path that this server has returned, such as "
                f"{SCHEME}MODEL/{kind}/NAME."
            )
        model, _, name = parts
        if not _MODEL.fullmatch(model) or not _NAME.fullmatch(name):
            raise Refused(f"{path!r} names no {kind}: {model!r} or {name!r} is no name.")
        directory = self._where(model, kind, name)
        if not (directory / SAVED).is_file():
            raise Refused(f"{path!r} is not here; save it first, or look for its name.", 404)
        return model, directory

    def said(self, directory: Path) -> SavedModel:
        """Raises Refused where it cannot be read."""
        file = directory / SAVED
        try:
            return SavedModel(**parse_json(file.read_text()))
        except (ValueError, TypeError) as error:
            raise Refused(
                f"{file} does not say what was saved ({error}): it was edited or damaged. Restore "
                "it from a copy, or load something else."
            ) from error

    def exists(self, path: str, kind: Kind) -> bool:
        try:
            self.parse(path, kind)
        except Refused:
            return False
        return True

    @asynccontextmanager
    async def writing(self, path: str, said: SavedModel, *, overwrite: bool) -> AsyncIterator[Path]:
        """A directory to write to, which takes its place at the end of the block. Raises Refused
        where the name is taken; OSError as the disk does."""
        model, kind, name = path.removeprefix(SCHEME).split("/")
        assert kind in ("weights", "sampler_weights")
        place = self._where(model, kind, name)  # type: ignore[arg-type]
        if place.exists() and not overwrite:
            raise Refused(
                f"{path} is there already; choose another name, or save with overwrite=True.", 409
            )
        aside = place.with_name(f".{name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            yield aside
            (aside / SAVED).write_text(dump_json(asdict(said)))
            await asyncio.to_thread(write_manifest, aside)
            if place.exists():
                shutil.rmtree(_before(place), ignore_errors=True)
                place.rename(_before(place))
            aside.rename(place)
            shutil.rmtree(_before(place), ignore_errors=True)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def remove(self, directory: Path) -> None:
        for one in (_before(directory), directory):
            shutil.rmtree(one, ignore_errors=True)

    def of_model(self, model: str) -> list[dict[str, Any]]:
        """What there is of a model, as the client lists it, oldest first."""
        found = []
        kinds: tuple[tuple[Kind, str], ...] = (
            ("weights", "training"),
            ("sampler_weights", "sampler"),
        )
        for kind, called in kinds:
            for file in self._where(model, kind, "").glob(f"*/{SAVED}"):
                name = file.parent.name
                if not _NAME.fullmatch(name):
                    continue  # on its way, or about to go
                found.append(
                    {
                        "checkpoint_id": f"{kind}/{name}",
                        "checkpoint_type": called,
                        "time": file.stat().st_mtime,
                        "tinker_path": f"{SCHEME}{model}/{kind}/{name}",
                    }
                )
        return sorted(found, key=lambda one: one["time"])

    def _where(self, model: str, kind: Kind, name: str) -> Path:
        place = self._directory / model.replace(":", ".") / kind / name
        if name and not place.exists() and _before(place).exists():
            _before(place).rename(place)  # whoever overwrote it was killed between two renames
        return place


async def check_whole(path: str, directory: Path) -> None:
    """Reads all files of what was saved, in a thread. Raises Refused for damaged ones."""
    if faults := await asyncio.to_thread(faults_of, directory):
        raise Refused(
            f"{path} is not as it was saved: {'; '.join(faults)}. Restore {directory} from a copy, "
            "or use something else that was saved."
        )


def _before(place: Path) -> Path:
    """Where a directory waits until another has its place."""
    return place.with_name(f".{place.name}.before")
