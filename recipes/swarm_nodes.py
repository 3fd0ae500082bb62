"""Several nodes of a swarm on one machine: started, waited for, and what they earned.

Node n of NAME is the recipe's own command with --name NAME-n and the seed num_nodes * seed + n; its
peers are NAME-*, unless the command names others. What it prints goes to RUNS_DIR/NAME-n.log. A
node that fails holds up none of the others.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlsys import RunFailed, metrics
from rlsys.observe.metrics import read_metrics

# For a node that was told to end, to end its own processes.
END_S = 60.0


def run_nodes(script: str, name: str, num_nodes: int, seed: int, runs_dir: str) -> None:
    """Until all have ended. Raises RunFailed if one of them has failed."""
    names = node_names(name, num_nodes)
    Path(runs_dir).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the nodes, as Ctrl-C does
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, node in enumerate(names):
            options = node_options(sys.argv[1:], name, number, num_nodes * seed + number)
            processes.append(_start([script, *options], Path(runs_dir, f"{node}.log")))
        print(
            f"{num_nodes} nodes are training; {runs_dir}/{name}-*.log tell how it goes", flush=True
        )
        codes = [process.wait() for process in processes]
    finally:
        _end(processes)
    failed = {node: code for node, code in zip(names, codes, strict=True) if code}
    earned = {node: cumulative_reward(Path(runs_dir, node)) for node in names if node not in failed}
    for node, reward in earned.items():
        print(f"{node}: cumulative reward {reward:.2f}")
    print(f"all: cumulative reward {sum(earned.values()):.2f}")
    if failed:
        ends = ", ".join(f"{node} {_ended(code)}" for node, code in failed.items())
        raise RunFailed(f"{ends}; see {runs_dir}/{next(iter(failed))}.log")


def node_names(name: str, num_nodes: int) -> list[str]:
    return [f"{name}-{number}" for number in range(num_nodes)]


def node_options(arguments: Sequence[str], name: str, number: int, seed: int) -> list[str]:
    """The options of the whole swarm, with what is the node's own in the place of the swarm's."""
    own = {"--num-nodes": "1", "--name": f"{name}-{number}", "--seed": str(seed)}
    options: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option, equals, _ = argument.partition("=")
        if option.replace("_", "-") not in own:
            options.append(argument)
        elif not equals:
            next(rest)  # its value
    if not any(option.partition("=")[0] == "--peers" for option in options):
        own["--peers"] = f"{name}-*"
    return [*options, *(text for pair in own.items() for text in pair)]


def cumulative_reward(directory: Path) -> float:
    """Sum over the steps of the mean reward of what the node's own policy sampled."""
    lines = read_metrics(directory / "metrics.jsonl")
    return sum(line.get(metrics.REWARD_SAMPLED_MEAN, line[metrics.REWARD_MEAN]) for line in lines)


def _ended(code: int) -> str:
    """How a node failed."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else "failed"


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which ends them once
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
