"""Histories of runs that kept their promises, made up step by step, for tests that damage them."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import Tally
from rlsys.data.row_source import epoch_order
from rlsys.data.swarm.external_log import ExternalLog
from rlsys.data.swarm.shared_pool import SharedCompletion, SharedGroup
from rlsys.dataflow.scheduling.ledger import Event, Ledger, OpenGroup
from rlsys.runs.audit import Evidence
from rlsys.runs.checkpoint import Checkpoints
from rlsys.runs.export_seal import seal_export
from rlsys.runs.run_files import RunFiles
from rlsys.runs.run_history import State

GROUPS_PER_STEP = 2
GROUP_SIZE = 2
NUM_PROMPTS = 3  # of an epoch: few, so that epochs come round
SEED = 7
RUN_ID = "00c0ffee00c0ffee"


class MadeUpRun:
    """Issues, trains, drops, crashes and resumes by chance, as a controller would."""

    def __init__(self, chance: random.Random, *, max_staleness: int, num_steps: int) -> None:
        self.chance = chance
        self.max_staleness = max_staleness
        self.num_steps = num_steps
        self.events: list[Event] = []
        self.ledger = Ledger(self.events.append, groups_per_step=GROUPS_PER_STEP)
        self.metrics: list[dict[str, Any]] = []
        self.rollouts: list[dict[str, Any]] = []
        self.checkpoints = [0]

    def run(self) -> Evidence:
        while self.ledger.step < self.num_steps:
            self.issue()
            if self.chance.random() < 0.2:
                group = self.chance.choice(self.ledger.open_groups)
                self.ledger.drop(group.group_id, reason=self.chance.choice(["stale", "reward nan"]))
                self.issue()
            self.train()
            if self.chance.random() < 0.3:
                self.checkpoints.append(self.ledger.step)
            if self.chance.random() < 0.15:
                self.crash()
        for group in self.ledger.open_groups:
            self.ledger.drop(group.group_id, reason="surplus")
        return Evidence(
            groups_per_step=GROUPS_PER_STEP,
            group_size=GROUP_SIZE,
            max_staleness=self.max_staleness,
            num_steps=self.num_steps,
            recorded_groups=1,
            shuffle=True,
            prompt_order={"seed": SEED, "num_prompts": NUM_PROMPTS},
            events=self.events,
            metrics=self.metrics,
            rollouts=self.rollouts,
            checkpoints=sorted({*self.checkpoints[-3:], self.num_steps} - {0}),
            exported=True,
        )

    def issue(self) -> None:
        ledger = self.ledger
        last_step = min(ledger.step + self.max_staleness, self.num_steps)
        while (ledger.num_issued - ledger.num_dropped) < (last_step + 1) * GROUPS_PER_STEP:
            version = self.chance.randint(max(0, ledger.step - self.max_staleness), ledger.step)
            ledger.issue(ledger.num_issued, prompt_index=ledger.next_prompt, version=version)

    def train(self) -> None:
        step = self.ledger.step + 1
        chosen = self.ledger.open_groups[:GROUPS_PER_STEP]
        versions = {group.group_id: self.sampled(group, step) for group in chosen}
        oldest = {group: min(map(min, sampled)) for group, sampled in versions.items()}
        self.ledger.train(oldest, step=step)
        self.metrics.append(
            {
                "step": step,
                "policy_version": step,
                "rollouts/trained": step * GROUPS_PER_STEP * GROUP_SIZE,
                "staleness/max": step - 1 - min(oldest.values()),
            }
        )
        for group in chosen:
            if group.group_id % GROUPS_PER_STEP == 0:
                self.rollouts += [
                    self.record(step, group, index, sampled)
                    for index, sampled in enumerate(versions[group.group_id])
                ]

    def sampled(self, group: OpenGroup, step: int) -> list[list[int]]:
        """The version of each token of each rollout."""
        earliest = max(group.version, step - 1 - self.max_staleness)
        return [
            sorted(self.chance.randint(earliest, step - 1) for _ in range(4))
            for _ in range(GROUP_SIZE)
        ]

    def record(
        self, step: int, group: OpenGroup, index: int, versions: list[int]
    ) -> dict[str, Any]:
        epoch, place = divmod(group.prompt_index, NUM_PROMPTS)
        return {
            "step": step,
            "group_id": group.group_id,
            "index": index,
            "prompt": f"prompt {epoch_order(SEED, epoch, NUM_PROMPTS)[place]}",
            "completion": "word",
            "token_ids": [1, 2, 3, 4],
            "policy_versions": versions,
            "staleness": step - 1 - min(versions),
            "reward": 1.0,
            "rewards": {"r": 1.0},
            "advantage": 0.5,
            "finish_reason": "stop",
            "run_id": RUN_ID,
        }

    def crash(self) -> None:
        """And go on from the newest checkpoint, with what it held of groups that were open."""
        step = self.checkpoints[-1]
        self.ledger = Ledger.replay(
            self.events, self.events.append, groups_per_step=GROUPS_PER_STEP
        )
        self.ledger.resume(step=step)
        self.metrics = [line for line in self.metrics if line["step"] <= step]
        self.rollouts = [record for record in self.rollouts if record["step"] <= step]
        for group in self.ledger.open_groups:
            if group.version > step or self.chance.random() < 0.5:
                self.ledger.reissue(group.group_id, version=step)


def made_up_run(seed: int, *, max_staleness: int = 1, num_steps: int = 12) -> Evidence:
    return MadeUpRun(random.Random(seed), max_staleness=max_staleness, num_steps=num_steps).run()


def with_external_groups(evidence: Evidence) -> Evidence:
    """Every fourth prompt came with another run's rollouts; any could have."""
    evidence = copy.deepcopy(evidence)
    prompts = {e["group"]: e["prompt"] for e in evidence.events if e["event"] == "issued"}
    external = {
        prompt: SharedGroup(
            peer="b",
            group_id=prompt,
            asked=f"external {prompt}",
            row={"answer": str(prompt)},
            completions=[SharedCompletion(text="word", truncated=False)] * GROUP_SIZE,
            rewards=[0.0, 1.0],
        )
        if prompt % 4 == 0
        else None
        for prompt in prompts.values()
    }
    for record in evidence.rollouts:
        if (group := external[prompts[record["group_id"]]]) is not None:
            record |= {"prompt": group.asked, "row": group.row, "shared_by": "b"}  # type: ignore[operator]
    return replace(evidence, external=external)


def config_of(evidence: Evidence) -> dict[str, Any]:
    return {
        "seed": SEED,
        "num_steps": evidence.num_steps,
        "prompts_per_step": evidence.groups_per_step,
        "group_size": evidence.group_size,
        "asynchrony": {"max_staleness": evidence.max_staleness},
        "trainer": {"num_minibatches": 1, "num_epochs": 1},
        "observe": {"record_groups": evidence.recorded_groups},
        "data": {"shuffle": evidence.shuffle, "retire_at": None, "chat_template": False},
        "sampling": {"interrupt_after": None},
    }


def files_of_a_run(path: Path, config: Mapping[str, Any] | None = None) -> RunFiles:
    """With the config.json of one that has begun."""
    files = RunFiles(path)
    files.config.write_text(json.dumps({"config": config or {}, "run_id": RUN_ID}))
    return files


def write_run(evidence: Evidence, path: Path) -> RunFiles:
    """The files of a run directory that hold the evidence, checkpoints included."""
    path.mkdir(parents=True)
    files = files_of_a_run(path, config_of(evidence))
    for file, lines in (
        (files.ledger, evidence.events),
        (files.metrics, evidence.metrics),
        (files.rollouts, evidence.rollouts),
    ):
        file.write_text("".join(text(lines)))
    if evidence.external:
        log = ExternalLog(files.external)
        for index, group in evidence.external.items():
            log.decide(index, group)
        log.close()
    if evidence.exported:
        files.hf.mkdir()
        (files.hf / "model.safetensors").write_text("weights")
        seal_export(files.hf, evidence.num_steps, run_id=RUN_ID)
    asyncio.run(_write_checkpoints(evidence, files))
    return files


def text(lines: Iterable[Any]) -> list[str]:
    return [json.dumps(line) + "\n" for line in lines]


def _num_issued(events: Sequence[Event]) -> int:
    return sum(event["event"] == "issued" for event in events)


async def _write_checkpoints(evidence: Evidence, files: RunFiles) -> None:
    ledger, records = text(evidence.events), text(evidence.rollouts)
    external = files.external.read_bytes().splitlines(keepends=True) if evidence.external else []
    # Where the event of each step's training stands that counts.
    trained = {e["step"]: i for i, e in enumerate(evidence.events) if e["event"] == "trained"}
    checkpoints = Checkpoints(files.checkpoints, keep=100)
    checkpoints.initial_weights.mkdir(parents=True)
    (checkpoints.initial_weights / "weights").write_text("as taught")
    beginning = checkpoints.seal_initial_weights()
    for step in evidence.checkpoints:
        async with checkpoints.writing(step) as checkpoint:
            checkpoint.trainer_dir.mkdir()
            (checkpoint.trainer_dir / "weights").write_text(f"weights of {step}")
            assert evidence.prompt_order is not None
            state = State(
                step=step,
                prompts=evidence.prompt_order,
                records={
                    path.name: Tally().plus("".join(lines[:end]).encode())
                    for path, lines, end in (
                        (files.ledger, ledger, trained[step] + 1),
                        (files.metrics, text(evidence.metrics), step),
                        (
                            files.rollouts,
                            records,
                            sum(r["step"] <= step for r in evidence.rollouts),
                        ),
                    )
                },
                beginning=beginning,
                external=Tally().plus(
                    b"".join(external[: _num_issued(evidence.events[: trained[step] + 1])])
                )
                if external
                else None,
            )
            checkpoint.controller_file.write_text(json.dumps(state.to_dict()))
