"""Pickling of functions and classes of a recipe's script for other processes.

cloudpickle pickles by value what other processes cannot import. Code keeps the name of its file,
which cloudpickle omits since version 3.1.3, so that tracebacks show the lines of the user's code.
"""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle


def dumps(value: object) -> bytes:
    """Return the pickle of a value for `pickle.loads`.

    Errors of parts that cannot be pickled are raised unchanged.
    """
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
