"""Messages about failed calls describe what an actor did."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import actors
from actors.cluster.calls import Heartbeat
from actors.cluster.method_words import WORDS

FOLDER = Path(actors.__file__).parent


def actor_classes(base: type[Any]) -> Iterator[type[Any]]:
    """Yield the classes below `base`, without those that Ray derives from them."""
    for one in base.__subclasses__():
        if one.__module__.startswith("actors.") and not one.__name__.startswith("ActorClass("):
            yield one
        yield from actor_classes(one)


def test_each_method_of_an_actor_has_words_and_no_other() -> None:
    for file in FOLDER.rglob("*.py"):
        if "Heartbeat" in file.read_text():
            importlib.import_module(".".join(file.relative_to(FOLDER.parent).with_suffix("").parts))
    methods = {
        name
        for one in actor_classes(Heartbeat)
        for name, _ in inspect.getmembers(one, inspect.isfunction)
        if not name.startswith("_")
    }
    assert {"start", "update_weights", "optimizer_step", "score", "lease"} <= methods
    assert methods == set(WORDS)
