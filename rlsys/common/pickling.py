"""Functions and classes of a recipe's script on their way to other processes.

In: any value. Out: its pickle, in which cloudpickle puts by value what no other process could
import. Code keeps the name of its file, which cloudpickle itself leaves out since version 3.1.3:
a traceback of code without it shows no line of what the user wrote.
"""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle


def dumps(value: object) -> bytes:
    """For `pickle.loads`. Raises what the value's own parts raise that cannot be pickled."""
    with io.BytesIO() as pickled:
        _Pickler(pickled).dump(value)
        return pickled.getvalue()


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _code_of_file, (code.co_filename, make, parts)


def _code_of_file(filename: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    return make(*parts).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )
