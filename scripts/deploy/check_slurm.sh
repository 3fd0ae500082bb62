#!/usr/bin/env bash
# Proves deploy/slurm/rlsys.sbatch on a real SLURM controller with two nodes on this machine:
# submit, preempt by a job of higher priority, requeue by hand, finish, audit.
#
#   sudo bash scripts/deploy/check_slurm.sh [DIRECTORY]
#
# It needs root, iproute2, and: apt-get install slurmctld slurmd slurm-client munge. Each node has a
# network namespace and a /dev/shm of its own. All processes end with the script. 5 to 20 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

directory=$(realpath -m "${1:-/tmp/rlsys-slurm}")
runs=$directory/runs
run=$runs/preempted
export SLURM_CONF=$directory/slurm.conf
NUM_STEPS=${NUM_STEPS:-200}
LIMIT_S=${LIMIT_S:-900}

step() { echo "$(date +%T) $*"; }
die() {
    echo "error: $*" >&2
    tail -n 30 "$directory"/*.log >&2 || true
    exit 1
}
until_true() { # until_true NAME COMMAND...: wait until the command succeeds
    local name=$1 deadline=$((SECONDS + LIMIT_S))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || die "not within $LIMIT_S s: $name"
        sleep 1
    done
    step "$name"
}

pids=()
end() {
    trap - EXIT
    scancel --quiet "${job:-0}" "${urgent:-0}" 2>/dev/null || true
    local deadline=$((SECONDS + 60)) pid
    while [ -n "$(squeue --noheader 2>/dev/null)" ] && ((SECONDS < deadline)); do sleep 1; done
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
    ip link del rlslurm 2>/dev/null || true
    ip netns del rln1 2>/dev/null || true
    ip netns del rln2 2>/dev/null || true
}
trap end EXIT
trap 'exit 143' TERM INT

rm -rf "$directory"
mkdir -p "$runs" "$directory/state"

step "starting SLURM $(slurmctld -V | cut -d ' ' -f 2) with two nodes"
ip link add rlslurm type bridge
ip addr add 10.98.0.254/24 dev rlslurm
ip link set rlslurm up
for node in 1 2; do
    ip netns add "rln$node"
    ip link add "rlv$node" type veth peer eth0 netns "rln$node"
    ip link set "rlv$node" master rlslurm up
    ip -n "rln$node" addr add "10.98.0.$node/24" dev eth0
    ip -n "rln$node" link set lo up
    ip -n "rln$node" link set eth0 up
done
host=$(hostname -s)
cat >"$SLURM_CONF" <<CONF
ClusterName=check
SlurmctldHost=$host(10.98.0.254)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation=$directory/state
SlurmdSpoolDir=$directory/spool-%n
SlurmctldPidFile=$directory/slurmctld.pid
SlurmdPidFile=$directory/slurmd-%n.pid
SlurmctldLogFile=$directory/slurmctld.log
SlurmdLogFile=$directory/slurmd-%n.log
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=n1 NodeHostname=$host NodeAddr=10.98.0.1 Port=16821 CPUs=2
NodeName=n2 NodeHostname=$host NodeAddr=10.98.0.2 Port=16822 CPUs=2
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=300
PartitionName=high Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
CONF
mkdir -p /run/munge
chown munge: /run/munge
setpriv --reuid munge --regid munge --init-groups /usr/sbin/munged --foreground --force \
    >"$directory/munged.log" 2>&1 &
pids+=($!)
until_true "munge answers" munge -n
slurmctld -D -c >"$directory/slurmctld-output.log" 2>&1 &
pids+=($!)
for node in 1 2; do
    # shellcheck disable=SC2016  # expanded in the namespace
    nsenter "--net=/run/netns/rln$node" unshare --mount sh -c \
        'mount -t tmpfs -o size=2g tmpfs /dev/shm && exec slurmd -D -N "$0"' "n$node" \
        >"$directory/slurmd-n$node-output.log" 2>&1 &
    pids+=($!)
done
idle() { [ "$(sinfo --noheader --partition low --states idle --format %D)" = 2 ]; }
until_true "two nodes are idle" idle

num_trained() { [ -f "$run/metrics.jsonl" ] && wc -l <"$run/metrics.jsonl" || echo 0; }
has_trained() { (($(num_trained) >= $1)); }
state() { squeue --noheader --job "$job" --format %T; }
is_in() { [ "$(state)" = "$1" ]; }
restarts() { scontrol show job "$job" | grep -o 'Restarts=[0-9]*' | cut -d = -f 2; }
has_restarted() { (($(restarts) >= $1)) && is_in RUNNING; }

job=$(RUNS_DIR=$runs RUN_NAME=preempted sbatch --parsable --partition low --nodes=2 \
    --output "$directory/job.log" deploy/slurm/rlsys.sbatch recipes/quickstart.py \
    --num-steps "$NUM_STEPS" --trainer.layout dp3 --prompts-per-step 6 --warm-start-batch 9 \
    --warm-start-steps 10 --checkpoint-every 1h --seed 7)
until_true "job $job trains on two nodes: 3 steps" has_trained 3

urgent=$(sbatch --parsable --partition high --nodes=2 --exclusive --output "$directory/urgent.log" \
    --wrap 'sleep 5; echo ended')
step "submitted job $urgent of higher priority"
until_true "job $job was preempted and waits" is_in PENDING
[ -f "$run/.checkpointed" ] || die "preemption left no checkpoint"
step "checkpoint of the preempted job: $(cat "$run/.checkpointed")"
until_true "job $urgent has ended" grep -q ended "$directory/urgent.log"
scontrol update "JobId=$job" StartTime=now # SLURM waits two minutes before it starts it again
until_true "job $job was started again" has_restarted 1
resumed=$(num_trained)
until_true "job $job has trained $((resumed + 3)) steps" has_trained $((resumed + 3))

scontrol requeue "$job"
step "requeued job $job without a warning"
until_true "job $job waits again" is_in PENDING
scontrol update "JobId=$job" StartTime=now
until_true "job $job was started a third time" has_restarted 2

finished() { [ -z "$(state 2>/dev/null)" ] || is_in COMPLETED; }
until_true "job $job has ended" finished
has_trained "$NUM_STEPS" || die "only $(num_trained) steps of $NUM_STEPS"
python -m rlsys audit "$run" || die "the audit found faults"
grep -h 'start [0-9] of job' "$directory/job.log"
step "passed: $NUM_STEPS steps over $(grep -c 'start [0-9] of job' "$directory/job.log") starts"
