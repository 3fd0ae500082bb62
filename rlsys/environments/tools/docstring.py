"""Parsing of docstrings in Google's style: description and text per parameter."""

from __future__ import annotations

import inspect
import itertools
import re

SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*$", re.IGNORECASE
)
PARAMETERS = ("args", "arguments", "parameters")
PARAMETER = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def described(docstring: str | None) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, one line per paragraph, and texts by parameter."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    starts = [i for i, line in enumerate(lines) if SECTION.match(line)]
    summary = lines[: starts[0]] if starts else lines
    parameters: dict[str, str] = {}
    for start, end in itertools.pairwise([*starts, len(lines)]):
        if lines[start].strip().rstrip(":").lower() in PARAMETERS:
            parameters = _parameters(lines[start + 1 : end])
    paragraphs = re.split(r"\n\s*\n", "\n".join(summary).strip())
    return "\n\n".join(_one_line(one) for one in paragraphs), parameters


def _parameters(lines: list[str]) -> dict[str, str]:
    """Return the texts of one section. An entry starts at the indentation of the section."""
    filled = [line for line in lines if line.strip()]
    if not filled:
        return {}
    indentation = len(filled[0]) - len(filled[0].lstrip())
    found: dict[str, str] = {}
    name = ""
    for line in filled:
        is_deeper = len(line) - len(line.lstrip()) > indentation
        entry = None if is_deeper else PARAMETER.match(line.strip())
        if entry:
            name = entry[1]
            found[name] = entry[2]
        elif name:
            found[name] += f" {line.strip()}"
    return {name: _one_line(text) for name, text in found.items()}


def _one_line(text: str) -> str:
    return " ".join(text.split())
