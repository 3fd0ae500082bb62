#!/usr/bin/env bash
# Sets up the environment, then lint, types and tests. Arguments go to pytest:
#   bash scripts/test.sh -m slow          the longer tests
#   bash scripts/test.sh tests/dataflow   one part
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
mypy
# Two at a time: most of an end-to-end test is waiting for processes to start.
# Files in their order, which has the longest ones in the middle: none is left alone at the end.
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
