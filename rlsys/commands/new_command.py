"""Write a project: a recipe, its reward with a unit test, a configuration and a README.

    rlsys new demo && cd demo
    rlsys run recipe.py

The files are those of rlsys/commands/project/. The project trains a model of 0.8 million parameters
with GRPO on sums, which takes minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from rlsys.errors import InvalidValue, require

# Files of the package end in .template, so that tools do not take them for its modules.
SUFFIX = ".template"


def main(arguments: Sequence[str]) -> None:
    """Write the project and print the next commands."""
    parser = argparse.ArgumentParser(
        prog="rlsys new", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new or empty directory")
    directory = parser.parse_args(arguments).directory
    names = write_project(directory)
    print(f"{directory}: {', '.join(names)}")
    print(f"Next: cd {shlex.quote(str(directory))} && rlsys run recipe.py")


def write_project(directory: Path) -> list[str]:
    """Write the files of a project and return their names.

    Raises:
        InvalidValue: The directory is not empty, is a file, or cannot be written.
    """
    fix = "Choose a new directory."
    is_file = directory.exists() and not directory.is_dir()
    require(not is_file, "DIR", str(directory), rule="is a file", fix=fix)
    templates = {
        one.name.removesuffix(SUFFIX): one
        for one in resources.files("rlsys.commands").joinpath("project").iterdir()
        if one.name.endswith(SUFFIX)
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = sorted(one.name for one in directory.iterdir())
        require(not found, "DIR", str(directory), rule=f"is not empty ({_few(found)})", fix=fix)
        for name, template in sorted(templates.items()):
            (directory / name).write_bytes(template.read_bytes())
    except OSError as error:
        raise InvalidValue(
            "DIR", str(directory), rule=f"cannot be written ({error.strerror})", fix=fix
        ) from error
    return sorted(templates)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
