from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from pathlib import Path

from rlsys.common import pickling


def test_code_keeps_the_name_of_its_file_and_its_lines() -> None:
    def outer(denominator: int) -> float:
        return inner(denominator)

    def inner(denominator: int) -> float:
        return 1 / denominator

    there = pickle.loads(pickling.dumps(outer))
    assert there(4) == 0.25
    assert there.__code__ is not outer.__code__
    try:
        there(0)
    except ZeroDivisionError as error:
        lines = [frame.line for frame in traceback.extract_tb(error.__traceback__)]
        assert lines[1:] == ["return inner(denominator)", "return 1 / denominator"]


def test_classes_of_a_script_are_unpickled_in_another_process(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from rlsys.common import pickling\n"
        "class Adds:\n"
        "    def __init__(self, term): self.term = term\n"
        "    def __call__(self, x): return (lambda y: y + self.term)(x)\n"
        "sys.stdout.buffer.write(pickling.dumps(Adds(3)))\n"
    )
    pickled = subprocess.run([sys.executable, script], check=True, capture_output=True).stdout
    adds = pickle.loads(pickled)
    assert adds(4) == 7
    assert type(adds).__call__.__code__.co_filename == str(script)
    nested = [x for x in type(adds).__call__.__code__.co_consts if hasattr(x, "co_filename")]
    assert {code.co_filename for code in nested} == {str(script)}
