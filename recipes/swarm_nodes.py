"""Start several nodes of a swarm on one machine, wait for them, and print their rewards.

Node n of NAME is the recipe's command with --name NAME-n and the seed num_nodes * seed + n. Its
peers are NAME-*, unless the command names others. Its output goes to RUNS_DIR/NAME-n.log. A node
that fails does not stop the others. All nodes are ended when this process ends, however it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlsys import RunFailed, metrics
from rlsys.common.process_supervisor import PR_SET_PDEATHSIG, prctl
from rlsys.runs.observe.metrics_file import read_metrics

# Time for a node to end its own processes.
END_S = 60.0

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # like Ctrl-C, they end the nodes


def run_nodes(script: str, name: str, num_nodes: int, seed: int, runs_dir: str) -> None:
    """Run all nodes to their end.

    Raises:
        RunFailed: A node failed.
    """
    names = node_names(name, num_nodes)
    Path(runs_dir).mkdir(parents=True, exist_ok=True)
    for ending in ENDING:
        if signal.getsignal(ending) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(ending, signal.default_int_handler)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, node in enumerate(names):
            options = node_options(sys.argv[1:], name, number, num_nodes * seed + number)
            processes.append(_start([script, *options], Path(runs_dir, f"{node}.log")))
        print(
            f"{num_nodes} nodes are training; see {runs_dir}/{name}-*.log for progress", flush=True
        )
        codes = [process.wait() for process in processes]
    finally:
        _end(processes)
    failed = {node: code for node, code in zip(names, codes, strict=True) if code}
    earned: list[float] = []
    for node in names:
        if node in failed:
            continue
        try:
            earned.append(cumulative_reward(Path(runs_dir, node)))
            print(f"{node}: cumulative reward {earned[-1]:.2f}")
        except (OSError, ValueError) as error:  # for example if its directory was removed
            print(f"{node}: finished, but its rewards cannot be read ({error})")
    print(f"all: cumulative reward {sum(earned):.2f}")
    if failed:
        ends = ", ".join(f"{node} {_ended(code)}" for node, code in failed.items())
        raise RunFailed(f"{ends}; see {runs_dir}/{next(iter(failed))}.log")


def node_names(name: str, num_nodes: int) -> list[str]:
    """Return the names of the nodes."""
    return [f"{name}-{number}" for number in range(num_nodes)]


def node_options(arguments: Sequence[str], name: str, number: int, seed: int) -> list[str]:
    """Return the options of one node: those of the swarm, with the node's name, seed and peers."""
    own = {"--num-nodes": "1", "--name": f"{name}-{number}", "--seed": str(seed)}
    options: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option, equals, _ = argument.partition("=")
        if option.replace("_", "-") not in own:
            options.append(argument)
        elif not equals:
            next(rest)  # the value of the option
    if not any(option.partition("=")[0] == "--peers" for option in options):
        own["--peers"] = f"{name}-*"
    return [*options, *(text for pair in own.items() for text in pair)]


def cumulative_reward(directory: Path) -> float:
    """Return the sum over steps of the mean reward that the node's own policy sampled."""
    lines = read_metrics(directory / "metrics.jsonl")
    return sum(line.get(metrics.REWARD_SAMPLED_MEAN, line[metrics.REWARD_MEAN]) for line in lines)


def _ended(code: int) -> str:
    """Return how a node failed."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else "failed"


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    launcher = os.getpid()

    def end_with_launcher() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:  # the launcher was killed before
            os._exit(1)

    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C only reaches this process, which ends the nodes once
            preexec_fn=end_with_launcher,
        )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    raise SystemExit(
        "recipes/swarm_nodes.py is a part of another recipe. Run `python recipes/swarm.py`."
    )
