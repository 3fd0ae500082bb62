#!/usr/bin/env bash
# Submits a recipe in its current state on disk to a running Ray cluster, and follows its output. The
# exit code is 0 if the job succeeded, else 1.
#
#   bash scripts/submit.sh recipes/quickstart.py --runs-dir /shared/runs --name first
#   bash scripts/submit.sh ~/project/mine.py --runs-dir /shared/runs
#
# RAY_API_SERVER_ADDRESS (http://HEAD:8265) names the cluster; the default is the one on this machine.
# See docs/cluster.md for starting one and for its token.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=python; fi
RAY_AUTH_MODE=${RAY_AUTH_MODE:-token} exec "$python" "$root/scripts/submit.py" "$@"
