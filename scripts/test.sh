#!/usr/bin/env bash
# Sets up the environment, then runs lint, type checks and tests. Arguments go to pytest:
#   bash scripts/test.sh -m slow          the longer tests
#   bash scripts/test.sh tests/dataflow   one part
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
mypy
# Two at a time: an end-to-end test mostly waits for processes to start.
# Files run in order, with the longest ones in the middle, so that none runs alone at the end.
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
