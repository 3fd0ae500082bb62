"""Serve a model over the Tinker API for the unmodified `tinker` client.

    python scripts/serve_primitives.py --model.path Qwen/Qwen3-0.6B

The API has forward_backward, optim_step, sample, save and load. The command prints the client's
settings (TINKER_BASE_URL, TINKER_API_KEY). The key is that of the variable TINKER_API_KEY, or a new
one. See docs/primitives.md.
"""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass

import rlsys
from rlsys.common.run_sync import run_to_end
from rlsys.config.fields import to_toml
from rlsys.tinker_server.server_config import ServerConfig


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the command."""

    config: str | None = None
    """File with options: TOML. The command line wins over it."""
    dry_run: bool = False
    """Print the configuration (a file for --config) and exit. The model is not checked."""


@rlsys.main
def main() -> None:
    """Run the command line."""
    parsed = rlsys.parse(ServerConfig, sys.argv[1:], doc=__doc__, options=ServeOptions)
    if parsed.dry_run:
        print(to_toml(parsed.config))
        return
    from actors.tinker_server.serving import checked, connected_to_ray, serve

    key = os.environ.get("TINKER_API_KEY") or f"tml-{secrets.token_hex(16)}"
    ready = checked(parsed.config, key)
    with connected_to_ray(parsed.config):
        run_to_end(lambda: serve(ready))


if __name__ == "__main__":
    main()
