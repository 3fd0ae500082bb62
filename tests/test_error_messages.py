"""The rules and fixes of all InvalidValue errors, in one file that people review.

`python -m tests.test_error_messages` writes tests/error_messages.txt anew.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).with_name("error_messages.txt")


def text(node: ast.expr) -> str:
    """Return an expression as text; the parts of an f-string that vary stay in braces."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text(value) for value in values)
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text(left) + text(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"[{text(body)} | {text(orelse)}]"
        case _:
            return "{" + ast.unparse(node) + "}"


@cache
def messages() -> list[str]:
    """Return `module: field: rule. fix` of every InvalidValue(...) and require(...) call."""
    lines: list[str] = []
    for package in ("rlsys", "actors", "recipes"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path == ROOT / "rlsys" / "errors.py":
                continue
            found = []
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                if {"rule", "fix"} <= keywords.keys():
                    is_require = isinstance(node.func, ast.Name) and node.func.id == "require"
                    fields = node.args[1:] if is_require else node.args
                    field = text(fields[0]) if fields else "{field}"
                    rule, fix = text(keywords["rule"]), text(keywords["fix"])
                    found.append((node.lineno, f"{field}: {rule}. {fix}"))
            name = path.relative_to(ROOT)
            lines.extend(f"{name}: {' '.join(line.split())}" for _, line in sorted(found))
    return lines


def test_the_reviewed_messages_are_those_of_the_code() -> None:
    lines = GOLDEN.read_text().splitlines()
    assert lines == messages(), "run python -m tests.test_error_messages, and review the difference"


def test_each_message_ends_with_a_fix() -> None:
    for line in messages():
        assert line.endswith((".", "}", "]", "?")), line
        assert ".. " not in line, line


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{line}\n" for line in messages()))
