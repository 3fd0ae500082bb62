#!/usr/bin/env bash
# Runs a peer on the CPU, in its own environment, which the first run creates. The last line of the
# output is JSON with the keys of the benchmark that it is compared with.
#
#   bash scripts/bench/peers/run.sh trl_grpo MODEL_DIR        against scripts/bench/e2e.py
#   bash scripts/bench/peers/run.sh trl_real_model MODEL_DIR  against scripts/bench/real_model.py
#   bash scripts/bench/peers/run.sh hf_generate MODEL_DIR     against scripts/bench/generate.py
#   bash scripts/bench/peers/run.sh transferqueue             against scripts/bench/store.py
#
# Environments are in RLSYS_PEERS (unset: ~/.cache/rlsys/peers); PYTHON chooses the interpreter.
set -euo pipefail

TRANSFORMERS="transformers==5.19.*"
needs=${1:-}
case $needs in
    trl_grpo | trl_real_model) needs=trl_grpo requirements=("trl==1.16.0" "$TRANSFORMERS") options=() ;;
    hf_generate) requirements=("$TRANSFORMERS" numpy) options=() ;;
    transferqueue) requirements=("TransferQueue==0.1.11") options=(--measure) ;;
    *)
        echo "error: '$needs' is not a peer. Use trl_grpo, trl_real_model, hf_generate or" \
            "transferqueue" >&2
        exit 2
        ;;
esac
peer=$1
shift
environment=${RLSYS_PEERS:-$HOME/.cache/rlsys/peers}/$needs
if [ ! -f "$environment/.ready" ]; then
    echo "creating $environment" >&2
    "${PYTHON:-python3}" -m venv "$environment"
    # torch is installed first: an open range would take a build with the CUDA libraries.
    for requirement in "torch==2.13.0" "${requirements[@]}"; do
        "$environment/bin/python" -m pip --disable-pip-version-check install --quiet "$requirement"
    done
    touch "$environment/.ready"
fi
exec "$environment/bin/python" "$(dirname "${BASH_SOURCE[0]}")/$peer.py" "${options[@]}" "$@"
