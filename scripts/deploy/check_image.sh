#!/usr/bin/env bash
# Proves deploy/Dockerfile: builds the image with podman on a local base and runs a few steps of the
# quickstart in it, as a user without rights and without network, then audits the run.
#
#   sudo bash scripts/deploy/check_image.sh [DIRECTORY]
#
# It needs root and: apt-get install --no-install-recommends podman buildah runc fuse-overlayfs
# iptables debootstrap. No registry is asked: the base is debootstrap's Debian (MIRROR). pip in the
# build uses this machine's configuration, mounted and not copied; PIP_MOUNTS names the paths to
# which it refers, such as certificates and local packages, separated by spaces. 10 to 30 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

directory=$(realpath -m "${1:-/tmp/rlsys-image}")
MIRROR=${MIRROR:-http://deb.debian.org/debian}
BASE=${BASE:-docker.io/library/debian:bookworm}
IMAGE=${IMAGE:-localhost/rlsys:check}
VARIANT=${VARIANT:-cpu}
TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
read -ra mounts <<<"${PIP_MOUNTS:-}"
# Without CAP_SYS_RESOURCE, limits cannot be raised above those of this process.
limits=(--ulimit nofile=1024:1024 --ulimit nproc=4096:4096)

step() { echo "$(date +%T) $*"; }

mkdir -p "$directory"
if ! podman image exists "$BASE"; then
    step "making $BASE"
    [ -d "$directory/base" ] || debootstrap --variant=minbase bookworm "$directory/base" "$MIRROR" \
        >"$directory/debootstrap.log"
    tar -C "$directory/base" -c . | podman import --quiet - "$BASE"
fi

step "building $IMAGE ($VARIANT)"
volumes=(--volume "$directory/pip.conf:/etc/pip.conf:ro")
for path in "${mounts[@]}"; do volumes+=(--volume "$path:$path:ro"); done
{
    echo '[global]'
    python3 -m pip config list | grep -v constraint \
        | sed -E "s/^(global|:env:)\\.//; s/='(.*)'\$/ = \\1/" | awk -F ' = ' '!seen[$1]++'
} >"$directory/pip.conf"
buildah bud --isolation chroot --network host "${volumes[@]}" \
    --build-arg "BASE=$BASE" --build-arg "VARIANT=$VARIANT" --build-arg "TORCH_INDEX=$TORCH_INDEX" \
    --file deploy/Dockerfile --tag "$IMAGE" . >"$directory/build.log" 2>&1 \
    || { tail -n 30 "$directory/build.log" >&2; exit 1; }
step "image of $(podman image inspect --format '{{.Size}}' "$IMAGE" | numfmt --to iec) bytes"

mkdir -p "$directory/runs"
chown 1000:1000 "$directory/runs"
rm -rf "$directory/runs/image"
in_image() { # in_image COMMAND...
    podman --runtime "${RUNTIME:-runc}" run --rm "${limits[@]}" --network none --shm-size 1g \
        --cap-drop all --security-opt no-new-privileges --volume "$directory/runs:/runs" "$IMAGE" "$@"
}
step "user: $(in_image id)"
in_image python -c 'import torch, vllm; print("torch", torch.__version__, "vllm", vllm.__version__)'
step "running the quickstart"
in_image python recipes/quickstart.py --runs-dir /runs --name image --num-steps 3 \
    --warm-start-steps 5 --prompts-per-step 8
in_image python -m rlsys audit /runs/image
step "passed"
