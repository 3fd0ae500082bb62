#!/usr/bin/env bash
# Sets up the environment and trains a small model with asynchronous GRPO. It needs no GPU, and no
# network after the set-up. Arguments go to the recipe:  bash scripts/quickstart.sh --num-steps 50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
# Two runs cannot share a directory, so each gets a new name, unless the user gives one or resumes.
case " $* " in
    *" --name"* | *" --help"* | *" --config"* | *" --resume"*) name=() ;;
    *) name=(--name "quickstart-$(date +%Y%m%d-%H%M%S)") ;;
esac
echo "Starting recipes/quickstart.py ..." >&2
exec .venv/bin/python recipes/quickstart.py "${name[@]}" "$@"
