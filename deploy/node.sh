#!/usr/bin/env bash
# Starts Ray on one node of a job. On the first node (rank 0) it waits until all nodes have joined,
# runs the command and returns its exit code. On the others it ends when the first node has ended.
#
#   bash deploy/node.sh RANK NUM_NODES HEAD_IP COMMAND...
#
# RAY_AUTH_TOKEN: a secret that all nodes share; anyone who has it can run programs on the cluster.
# RAY_PORT: port of the first node (6379). JOIN_TIMEOUT_S: limit for all nodes to join (600).
# SIGTERM ends the command in good order, and Ray with it.
set -euo pipefail

rank=$1 num_nodes=$2 head=$3
shift 3
port=${RAY_PORT:-6379}
: "${RAY_AUTH_TOKEN:?set it to a secret that all nodes share}"
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
# Ray would run its workers with the priority of background work.
export RAY_worker_niceness=${RAY_worker_niceness:-0}
# A short path: those of Ray's sockets are up to 85 characters longer, and have at most 107.
directory=${RAY_TMPDIR:-/tmp}/rl-$(id -u)-$port

is_up() { (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; }

failed() {
    tail -n 20 "$log" >&2 || true
    echo "error: Ray has ended on node $rank" >&2
    exit 1
}

ray=0 command=0
# shellcheck disable=SC2329  # called by trap
end() {
    trap - EXIT
    [ "$command" = 0 ] || kill -TERM "$command" 2>/dev/null || true
    [ "$command" = 0 ] || wait "$command" || true
    [ "$ray" = 0 ] || kill -TERM "$ray" 2>/dev/null || true
    [ "$ray" = 0 ] || wait "$ray" || true
    rm -rf "$directory"
}
trap end EXIT
trap 'end; exit 143' TERM INT

mkdir -p "$directory"
log=$directory/node-$rank.log
# Ray's object store holds metadata only: rollouts and weights have shared memory of their own.
options=(--block --disable-usage-stats --object-store-memory 536870912)

# start ARGUMENTS...: start Ray and return when it runs, or 1 when it has ended.
start() {
    : >"$log"
    ray start "${options[@]}" "$@" >"$log" 2>&1 &
    ray=$!
    until grep -q 'Ray runtime started' "$log"; do
        kill -0 "$ray" 2>/dev/null || return 1
        sleep 1
    done
}

if [ "$rank" = 0 ]; then
    start --head --node-ip-address "$head" --port "$port" --temp-dir "$directory" || failed
else
    # The port is open some seconds before the first node accepts others.
    deadline=$((SECONDS + ${JOIN_TIMEOUT_S:-600}))
    until is_up && start --address "$head:$port"; do
        if ((SECONDS >= deadline)); then
            is_up && failed
            echo "error: no Ray at $head:$port" >&2
            exit 1
        fi
        sleep 1
    done
    while is_up; do
        kill -0 "$ray" 2>/dev/null || failed
        sleep 2 &
        wait $! # so that a signal is handled at once
    done
    exit 0
fi

timeout "${JOIN_TIMEOUT_S:-600}" python - "$head:$port" "$num_nodes" <<'PY'
import sys
import time

import ray

address, num_nodes = sys.argv[1], int(sys.argv[2])
ray.init(address, log_to_driver=False, logging_level="ERROR")
while (joined := sum(node["Alive"] for node in ray.nodes())) < num_nodes:
    time.sleep(1)
print(f"{joined} of {num_nodes} nodes have joined.", flush=True)
PY

"$@" &
command=$!
code=0
wait "$command" || code=$?
command=0
exit "$code"
