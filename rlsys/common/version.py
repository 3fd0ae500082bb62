"""The version of rlsys, for modules that cannot import the package itself."""

from __future__ import annotations

VERSION = "0.1.0"
