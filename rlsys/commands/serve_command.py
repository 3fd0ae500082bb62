"""Serve a model over the Tinker API for the unmodified `tinker` client.

    rlsys serve --model.path Qwen/Qwen3-0.6B

The API has forward_backward, optim_step, sample, save and load. The command prints the client's
settings (TINKER_BASE_URL, TINKER_API_KEY). The key is that of the variable TINKER_API_KEY, or a new
one. See docs/primitives.md.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import rlsys
from rlsys.common.run_sync import run_to_end
from rlsys.config.fields import to_toml
from rlsys.launcher.launching import actors_module
from rlsys.tinker_server.server_config import ServerConfig


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the command."""

    config: str | None = None
    """File with options: TOML. The command line wins over it."""
    dry_run: bool = False
    """Print the configuration (a file for --config) and exit. The model is not checked."""


def main(arguments: Sequence[str]) -> None:
    """Serve until a signal ends the process."""
    parsed = rlsys.parse(ServerConfig, arguments, doc=__doc__, options=ServeOptions)
    if parsed.dry_run:
        print(to_toml(parsed.config))
        return
    serving = actors_module("tinker_server.serving")
    key = os.environ.get("TINKER_API_KEY") or f"tml-{secrets.token_hex(16)}"
    ready = serving.checked(parsed.config, key)
    with serving.connected_to_ray(parsed.config):
        run_to_end(lambda: serving.serve(ready))
