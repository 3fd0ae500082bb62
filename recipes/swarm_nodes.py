"""Several nodes of a swarm on one machine: started, waited for, and what they earned.

Node n of NAME is the recipe's own command with --name NAME-n and the seed num_nodes * seed + n; its
peers are NAME-*, unless the command names others. What it prints goes to RUNS_DIR/NAME-n.log. A
node that fails holds up none of the others; when this process ends, however it does, all of them
are told to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlsys import RunFailed, metrics
from rlsys.rewards.process.supervisor import PR_SET_PDEATHSIG, prctl
from rlsys.runs.observe.metrics_file import read_metrics

# For a node that was told to end, to end its own processes.
END_S = 60.0

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # they end the nodes, as Ctrl-C does


def run_nodes(script: str, name: str, num_nodes: int, seed: int, runs_dir: str) -> None:
    """Until all have ended. Raises RunFailed if one of them has failed."""
    names = node_names(name, num_nodes)
    Path(runs_dir).mkdir(parents=True, exist_ok=True)
    for ending in ENDING:
        if signal.getsignal(ending) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(ending, signal.default_int_handler)
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
    earned: list[float] = []
    for node in names:
        if node in failed:
            continue
        try:
            earned.append(cumulative_reward(Path(runs_dir, node)))
            print(f"{node}: cumulative reward {earned[-1]:.2f}")
        except (OSError, ValueError) as error:  # its directory was removed, say
            print(f"{node}: has ended well, but its rewards cannot be read ({error})")
    print(f"all: cumulative reward {sum(earned):.2f}")
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
    launcher = os.getpid()

    def end_with_launcher() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:  # it was killed before
            os._exit(1)

    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which ends them once
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
