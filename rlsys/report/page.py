"""The HTML file of a report page: one file with its styles, its program and its model.

    model ── JSON with escapes ──► <script type="application/json">, which no browser executes
    assets/ ─────────────────────► <style> and <script>, allowed by their checksums

Text of the run, such as completions, is hostile: it may contain markup, scripts and links. It is in
the page as JSON only, with every `<`, `>` and `&` escaped, and the program shows it as text. The
Content-Security-Policy allows the page's own program and styles by their checksums and nothing
else: no other script, no image, no connection. Only a live page may connect to its own server.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from rlsys.common.safe_json import dump_json

STYLES = ("uplot.min.css", "report.css")
PROGRAM = ("dom.js", "charts.js", "timeline.js", "groups.js", "sections.js", "start.js")
LIBRARY = "uplot.min.js"

LARGEST = 1e300  # of numbers in the page

UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def safe_json(model: Any) -> str:
    """Return JSON that can be between script tags and is valid UTF-8, whatever its strings are."""
    text = dump_json(_finite(model), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def size_in_page(value: Any) -> int:
    """Return the bytes of a part of the model, with its escapes."""
    return len(safe_json(value).encode())


def _finite(value: Any) -> Any:
    """Return a copy in which NaN, infinite and huge numbers of damaged files are null."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float | int) and not -LARGEST < value < LARGEST:
        return None
    return value


def page_html(model: Mapping[str, Any], *, live: bool) -> str:
    """Return the page of a model (rlsys.report.report_model.page_model)."""
    style, library, program = _assets()
    scripts = " ".join(_allowed(text) for text in (library, program))
    connections = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {_allowed(style)}; "
        f"img-src data:; connect-src {connections}; base-uri 'none'; "
        "form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>rlsys report</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<nav aria-label="Sections"></nav>
<main aria-busy="true"><noscript>This page needs JavaScript to draw its charts.</noscript></main>
<footer></footer>
<script type="application/json" id="model">{safe_json(model)}</script>
<script>{library}</script>
<script>{program}</script>
</body>
</html>
"""


@functools.cache
def _assets() -> tuple[str, str, str]:
    """Return the styles, the chart library and the program.

    uPlot is MIT-licensed: its notice is in the page, and its licence in assets/.
    """
    folder = resources.files("rlsys.report") / "assets"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    program = "\n".join(read(name) for name in PROGRAM)
    licence = read("uplot.LICENSE.txt").replace("*/", "")
    style = "\n".join(read(name) for name in STYLES)
    return style, f"/*! uPlot\n{licence}*/\n{read(LIBRARY)}", f'"use strict";\n{program}'


def _allowed(text: str) -> str:
    """Return the source expression of the policy that allows an inline element."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
