#!/usr/bin/env bash
# Proves deploy/kubernetes/rayjob.yaml as far as one machine can: the commands that KubeRay makes of
# it, its environment and its preStop hook, in two containers of the image, head and worker. The run
# is stopped in the middle, as when the job is suspended, started again, and finished.
#
#   sudo bash scripts/deploy/check_image.sh && sudo bash scripts/deploy/check_kubernetes.sh [DIRECTORY]
#
# It needs root and: apt-get install --no-install-recommends podman runc netavark aardvark-dns
# iptables; and python with PyYAML. 5 to 15 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

directory=$(realpath -m "${1:-/tmp/rlsys-kubernetes}")
IMAGE=${IMAGE:-localhost/rlsys:check}
NUM_STEPS=${NUM_STEPS:-200}
LIMIT_S=${LIMIT_S:-900}
options=(--num-steps "$NUM_STEPS" --trainer.layout dp3 --prompts-per-step 6 --warm-start-batch 9
    --warm-start-steps 10 --checkpoint-every 1h)
limits=(--ulimit nofile=1024:1024 --ulimit nproc=4096:4096)
network=rlsys-kubernetes
token=$(head -c 32 /dev/urandom | sha256sum | cut -d ' ' -f 1)

step() { echo "$(date +%T) $*"; }
field() { # field PYTHON: print an expression about the job's spec, cluster, head and worker
    python - "$1" <<'PY'
import shlex
import sys

import yaml

spec = yaml.safe_load(open("deploy/kubernetes/rayjob.yaml"))["spec"]
cluster = spec["rayClusterSpec"]
head, worker = (
    group["template"]["spec"]["containers"][0]
    for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0])
)
print(eval(sys.argv[1]))
PY
}

end() {
    trap - EXIT
    podman rm --force --ignore --time 5 rlsys-head rlsys-worker >/dev/null 2>&1 || true
    podman network rm --force "$network" >/dev/null 2>&1 || true
}
trap end EXIT
trap 'exit 143' TERM INT

rm -rf "$directory"
install -d -o 1000 -g 1000 "$directory/runs"
run=$directory/runs/quickstart
podman network create "$network" >/dev/null

container() { # container NAME ENVIRONMENT COMMAND: a pod of KubeRay
    podman --runtime "${RUNTIME:-runc}" run --detach --name "$1" --hostname "$1" \
        --network "$network" "${limits[@]}" --shm-size 2g --cap-drop all \
        --security-opt no-new-privileges --volume "$directory/runs:/runs" \
        --env RAY_AUTH_MODE=token --env "RAY_AUTH_TOKEN=$token" --env-file <(echo "$2") \
        "$IMAGE" /bin/bash -c -- "$3" >/dev/null
}
until_true() { # until_true COMMAND...: wait until the command succeeds
    local deadline=$((SECONDS + LIMIT_S))
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || { echo "error: not within $LIMIT_S s: $*" >&2; exit 1; }
        sleep 2
    done
}
has_two_nodes() {
    [ "$(podman exec rlsys-head ray list nodes --limit 9 2>/dev/null | grep -c ALIVE)" = 2 ]
}
start_cluster() {
    local variables="'\n'.join(f\"{v['name']}={v['value']}\" for v in"
    local parameters="' '.join(f'--{k}={v}' for k, v in cluster['headGroupSpec']['rayStartParams'].items())"
    container rlsys-head "$(field "$variables head['env'])")" \
        "ulimit -n 1024; ray start --head --block --num-cpus=2 $(field "$parameters")"
    until_true podman exec rlsys-head ray health-check
    container rlsys-worker "$(field "$variables worker['env'])")" \
        "ulimit -n 1024; ray start --address=rlsys-head:6379 --block --num-cpus=2"
    until_true has_two_nodes
    step "two pods are ready"
}
submit() {
    podman exec rlsys-head ray job submit --address http://127.0.0.1:8265 \
        --runtime-env-json "$(field '__import__("json").dumps(yaml.safe_load(spec["runtimeEnvYAML"]))')" \
        -- "$@" "${options[@]}"
}
num_trained() { [ -f "$run/metrics.jsonl" ] && wc -l <"$run/metrics.jsonl" || echo 0; }

read -ra entrypoint <<<"$(field 'spec["entrypoint"]')"
start_cluster
submit "${entrypoint[@]}" >"$directory/first.log" 2>&1 &
job=$!
deadline=$((SECONDS + LIMIT_S))
until (($(num_trained) >= 3)); do
    if ! kill -0 "$job" 2>/dev/null || ((SECONDS > deadline)); then
        tail -n 30 "$directory/first.log"
        exit 1
    fi
    sleep 1
done
step "the run has trained 3 steps; the pods are about to end: preStop"
hooks=()
for pod in head worker; do
    read -ra hook <<<"$(field "shlex.join(${pod}['lifecycle']['preStop']['exec']['command'])")"
    podman exec "rlsys-$pod" "${hook[@]}" &
    hooks+=($!)
done
for pid in "${hooks[@]}"; do wait "$pid"; done
step "checkpoint: $(cat "$run/.checkpointed")"
podman stop --time 80 rlsys-worker rlsys-head >/dev/null
podman rm rlsys-worker rlsys-head >/dev/null
wait "$job" || true
trained=$(num_trained)
((trained < NUM_STEPS)) || { echo "error: the run ended before it was stopped"; exit 1; }
step "stopped after $trained steps"

start_cluster
submit "${entrypoint[@]}" >"$directory/second.log" 2>&1 || { tail -n 30 "$directory/second.log"; exit 1; }
(($(num_trained) == NUM_STEPS)) || { echo "error: $(num_trained) steps of $NUM_STEPS"; exit 1; }
# In a finished run, the hook has nothing to wait for.
time podman exec rlsys-head "${hook[@]}"
podman exec rlsys-head python -m rlsys audit /runs/quickstart
step "passed"
