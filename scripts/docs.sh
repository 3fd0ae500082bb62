#!/usr/bin/env bash
# Builds the documentation site in build/site, without network. It fails at any warning.
#
#   pip install -e '.[docs]'
#   bash scripts/docs.sh              then: python -m http.server --directory build/site
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -x .venv/bin/zensical ]; then PATH=$PWD/.venv/bin:$PATH; fi
command -v zensical >/dev/null || { echo "error: no zensical: pip install -e '.[docs]'" >&2; exit 1; }

python scripts/site_pages.py
cd build
zensical build --clean --strict --config-file mkdocs.yml
