# shellcheck shell=bash
# Source this on the GPU machine: unpacks what scripts/gpu/prepare.sh collected, puts it on the
# Python path and gives the programs of the packages their place on PATH.
mkdir -p /tmp/rlsys-site
if [ ! -d /tmp/rlsys-site/ray ]; then
    cat .gpu/site.tar.xz.* | tar -xJ -C /tmp/rlsys-site
    chmod -R u+rx /tmp/rlsys-site/ray/core/src
fi
export PYTHONPATH="$PWD:/tmp/rlsys-site${PYTHONPATH:+:$PYTHONPATH}"
