#!/usr/bin/env bash
# Submits a recipe of this checkout, as it lies on disk, to a running Ray cluster, and follows its
# output until it ends: with code 0 if it succeeded, else 1.
#
#   bash scripts/submit.sh recipes/quickstart.py --runs-dir /shared/runs --name first
#
# RAY_API_SERVER_ADDRESS (http://HEAD:8265) names the cluster; unset, it is the one on this machine.
# docs/cluster.md says how to start one, and where the token comes from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    echo "error: $1; usage: bash scripts/submit.sh recipes/NAME.py [ARGS...]" >&2
    exit 2
}
case ${1:-} in
    "") usage "no recipe" ;;
    /*) usage "$1 is absolute, and would not be read from the upload" ;;
    *) [ -f "$1" ] || usage "$1 is no file of $PWD" ;;
esac

if [ -x .venv/bin/ray ]; then ray=.venv/bin/ray; else ray=ray; fi
# Ray leaves .git, .venv and whatever .gitignore names out of the upload: runs/ among it. After `ray
# job stop`, it would kill the run 3 s later; ending in good order can take longer.
RAY_AUTH_MODE=${RAY_AUTH_MODE:-token} exec "$ray" job submit \
    --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" --working-dir . \
    --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}' -- python "$@"
