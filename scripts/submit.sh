#!/usr/bin/env bash
# Submits a recipe, as it lies on disk, to a running Ray cluster, and follows its output until it
# ends: with code 0 if it succeeded, else 1.
#
#   bash scripts/submit.sh recipes/quickstart.py --runs-dir /shared/runs --name first
#   bash scripts/submit.sh ~/project/mine.py --runs-dir /shared/runs
#
# RAY_API_SERVER_ADDRESS (http://HEAD:8265) names the cluster; unset, it is the one on this machine.
# docs/cluster.md says how to start one, and where the token comes from.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=python; fi
RAY_AUTH_MODE=${RAY_AUTH_MODE:-token} exec "$python" "$root/scripts/submit.py" "$@"
