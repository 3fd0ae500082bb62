#!/usr/bin/env bash
# Collects the packages that a GPU machine without a network lacks, as archives of at most 60 MiB,
# in .gpu/ (ignored by git). Run it on a machine with a network and the same processor type:
#
#   bash scripts/gpu/prepare.sh [PYTHON_VERSION]        default 3.12
#
# On the GPU machine, in the checkout with .gpu/:
#
#   source scripts/gpu/unpack.sh && python3 scripts/gpu/check.py --out results
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON_VERSION=${1:-3.12}
# The GPU machine has torch, transformers and the usual scientific packages. Requirements of these
# packages that it also has are left out.
PACKAGES=(
    "ray==2.60.0" "datasets==5.2.0" "pydantic==2.13.*" annotated-types typing-inspection
    multiprocess dill jsonschema jsonschema-specifications referencing rpds-py
)
PART_BYTES=$((60 * 1024 * 1024))

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=()
for glibc in 2_39 2_34 2_28 2_27 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any)
download() {
    python3 -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
        --python-version "$PYTHON_VERSION" --implementation cp "${platforms[@]}" -d "$work/wheels" "$@"
}
for package in "${PACKAGES[@]}"; do download "$package"; done
# pydantic works with one version of its core only.
core=$(unzip -p "$work"/wheels/pydantic-2*.whl '*/METADATA' \
    | sed -n 's/^Requires-Dist: pydantic-core==\([0-9.]*\).*/\1/p')
download "pydantic-core==$core"

mkdir "$work/site"
for wheel in "$work"/wheels/*.whl; do unzip -q -o "$wheel" -d "$work/site"; done
# The parts of ray that no run here imports: Java, RLlib and the dashboard's pages.
rm -rf "$work/site/ray/jars" "$work/site/ray/rllib" "$work/site/ray/dashboard/client"
rm -rf .gpu
mkdir .gpu
tar -C "$work/site" -c . | xz -T0 -6 | split -b "$PART_BYTES" -d - .gpu/site.tar.xz.
ls -l .gpu
