"""Text of a dry run: it parses as TOML whatever its comments contain."""

from __future__ import annotations

import subprocess
import sys
import tomllib

from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import RunConfig
from rlsys.config.fields import to_toml
from rlsys.config.toml_document import document

TEXTS = st.text(st.characters(exclude_categories=()), max_size=60)


@given(st.lists(TEXTS | TEXTS.map(lambda text: f"a\n[{text}\r\nb = 1\x85\u2028c\x00")))
def test_the_text_of_a_dry_run_is_toml(facts: list[str]) -> None:
    text = document(RunConfig(), facts)
    assert tomllib.loads(text) == tomllib.loads(to_toml(RunConfig()))
    text.encode()  # no lone surrogate
    comments = text.removeprefix(to_toml(RunConfig())).split("\n")[1:]
    assert all(line.startswith("#") for line in comments)


PRINTS = """
import os, subprocess, sys
from rlsys.config.toml_document import stdout_to_stderr

print("before")
with stdout_to_stderr():
    print("own")
    subprocess.run([sys.executable, "-c", "print('child')"], check=True)
    os.write(1, b"descriptor")
print("after")
"""


def test_prints_of_user_code_are_not_part_of_the_file() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True
    )
    assert done.stdout == "before\nafter\n"
    assert {"own", "child", "descriptor"} <= {*done.stderr.split()}
