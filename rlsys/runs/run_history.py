"""Reading a run's files: the state in its checkpoints, and the evidence for an audit.

    checkpoints ─ controller.json ─► State         ─► rlsys.runs.resume
    all files                     ─► read_evidence ─► rlsys.runs.audit

A checkpoint's state has a checksum of each file of records at the time of writing (Tally). A resume
and an audit compare it with the file. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import Tally, regular_file
from rlsys.common.safe_json import parse_json
from rlsys.data.swarm.external_log import read_external
from rlsys.data.swarm.shared_pool import SharedGroup
from rlsys.dataflow.scheduling.ledger import Event, read_events
from rlsys.errors import InvalidValue
from rlsys.runs.audit import Evidence
from rlsys.runs.checkpoint import (
    Checkpoint,
    find_checkpoints,
    first_few,
    initial_weights_fault,
)
from rlsys.runs.evaluation_log import find_damage, find_missing
from rlsys.runs.export_seal import EXPORTED_FILE, early_end, export_faults, exported_step
from rlsys.runs.observe.metrics_file import metrics_fault
from rlsys.runs.observe.records import record_fault
from rlsys.runs.observe.step_log import read_lines
from rlsys.runs.run_directory import checkpointed_fault, foreign_rollouts, lost_checkpoints
from rlsys.runs.run_files import RunFiles, read_config, read_run_id

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class State:
    """Contents of a checkpoint's controller.json."""

    step: int
    prompts: Mapping[str, int]  # PromptSource.order
    records: Mapping[str, Tally]  # of RunFiles.records at the time of writing, by file name
    external: Tally | None = None  # of external.jsonl, if it exists
    coefficients: Mapping[str, float] = field(default_factory=dict)  # by stage
    retired: Sequence[int] = ()  # dataset rows that are not issued again
    beginning: str | None = None  # checksum of Checkpoints.initial_weights, if other models use it

    def to_dict(self) -> dict[str, Any]:
        """Return the state as controller.json has it."""
        tallies = {name: tally.to_dict() for name, tally in self.records.items()}
        return {
            "step": self.step,
            "prompts": dict(self.prompts),
            "records": tallies,
            "external": None if self.external is None else self.external.to_dict(),
            "retired": list(self.retired),
            "coefficients": dict(self.coefficients),
            "beginning": self.beginning,
        }


def read_state(checkpoint: Checkpoint) -> State:
    """Return the state in a checkpoint.

    Raises:
        InvalidValue: Its controller.json is damaged or belongs to another checkpoint.
    """
    try:
        entry = parse_json(regular_file(checkpoint.controller_file).read_bytes())
        if entry["step"] != checkpoint.step:
            raise ValueError(f"its step is {entry['step']}")
        prompts = {name: entry["prompts"][name] for name in ("seed", "num_prompts")}
        if "checksum" in entry["prompts"]:  # earlier versions did not write it
            prompts["checksum"] = entry["prompts"]["checksum"]
        least = {"seed": 0, "num_prompts": 1, "checksum": 0}
        if any(type(value) is not int or value < least[name] for name, value in prompts.items()):
            raise ValueError(f"prompts are {prompts}")
        retired = entry["retired"]
        if any(type(row) is not int or row < 0 for row in retired):
            raise ValueError(f"retired rows are {retired}")
        coefficients = entry["coefficients"]
        if any(type(value) is not float for value in coefficients.values()):
            raise ValueError(f"coefficients are {coefficients}")
        beginning = entry["beginning"]
        if not isinstance(beginning, str | None):
            raise ValueError(f"beginning is {beginning}")
        records = {
            path.name: Tally.from_dict(entry["records"][path.name])
            for path in RunFiles(checkpoint.path).records
        }
        external = entry.get("external")
        external = None if external is None else Tally.from_dict(external)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidValue(
            str(checkpoint.controller_file),
            rule=f"it does not belong to its checkpoint ({type(error).__name__}: {error}), so it "
            "was edited or written by another version of rlsys",
            fix="Restore it from a copy.",
        ) from error
    return State(
        step=checkpoint.step,
        prompts=entry["prompts"],
        records=records,
        external=external,
        retired=retired,
        coefficients=coefficients,
        beginning=beginning,
    )


def record_faults(state: State, files: RunFiles) -> list[str]:
    """Return what is wrong with the records that a checkpoint refers to."""
    expected = [(path, state.records[path.name]) for path in files.records]
    if state.external is not None:
        expected.append((files.external, state.external))
    return [f"{path.name} {fault}" for path, tally in expected if (fault := tally.fault(path))]


def read_evidence(path: Path) -> tuple[Evidence, list[str]]:
    """Return the evidence for an audit, and what is wrong with the files that hold it.

    Raises:
        InvalidValue: config.json is missing or damaged, or has no run_id.
    """
    files = RunFiles(path)
    settings = _Settings.read(files.config)
    run_id = files.run_id
    faults: list[str] = []
    former = [_Settings.read(other) for other in sorted(path.glob("config-*.json"))]
    for other in former:
        for name in ("prompts_per_step", "group_size", "seed", "asynchrony"):
            if other.value(name) != settings.value(name):
                faults.append(f"{other.path.name} has another {name} than {files.config.name}")
        if read_run_id(other.path) != run_id:
            faults.append(f"{other.path.name} has another run_id than {files.config.name}")
    states: dict[int, State] = {}
    checkpoints = find_checkpoints(files.checkpoints)
    for checkpoint in checkpoints:
        name = f"checkpoint {checkpoint.path.name}"
        if broken := checkpoint.faults():
            faults.append(f"{name} is damaged: {first_few(broken)}")
            continue
        try:
            state = states[checkpoint.step] = read_state(checkpoint)
        except ValueError as error:
            faults.append(str(error))
        else:
            faults += [
                f"{name} refers to records that changed: {f}" for f in record_faults(state, files)
            ]
    for seal in {state.beginning for state in states.values()}:
        if changed := initial_weights_fault(files.checkpoints, seal):
            faults.append(str(changed))
    faults += [str(error) for error in find_damage(files)] or find_missing(files)
    exported = exported_step(files.hf)
    if fault := checkpointed_fault(files):
        faults.append(str(fault))
    if not checkpoints and exported is None and (lost := lost_checkpoints(files)):
        faults.append(str(lost))
    if exported is None and (files.hf / EXPORTED_FILE).exists():
        faults.append(f"{files.hf / EXPORTED_FILE} is damaged, which has the step of hf/")
    damages = [] if exported is None else export_faults(files.hf, run_id=run_id)
    faults += [f"hf/, the model of step {exported}, is damaged: {f}" for f in damages]
    num_steps = settings.number("num_steps")
    end = early_end(files.hf)
    last_step = exported if end is not None and end.num_steps == num_steps else None
    # A run that failed during its start has written no records.
    has_begun = bool(states) or any(_is_not_empty(record) for record in files.records)
    updates = settings.number("trainer.num_minibatches") * settings.number("trainer.num_epochs")
    recorded = {one.number("observe.record_groups", at_least=0) for one in (settings, *former)}
    evidence = Evidence(
        groups_per_step=settings.number("prompts_per_step"),
        group_size=settings.number("group_size"),
        # In policy versions. Each has as many updates as a step.
        max_staleness=(settings.number("asynchrony.max_staleness", at_least=0) + 1) // updates - 1,
        updates_per_step=updates,
        num_steps=num_steps,
        recorded_groups=recorded.pop() if len(recorded) == 1 else None,
        shuffle=bool(settings.value("data.shuffle")),
        injects=settings.value("sampling.interrupt_after") is not None
        or settings.value("data.chat_template")
        is True,  # chats in a dataset may have turns of others
        retires=settings.value("data.retire_at") is not None,
        prompt_order=states[max(states)].prompts if states else None,
        events=_events(files.ledger, faults) if has_begun else [],
        external=_external(files.external, faults),
        metrics=list(_lines(files.metrics, metrics_fault, faults)) if has_begun else [],
        rollouts=list(_lines(files.rollouts, record_fault, faults)) if has_begun else [],
        checkpoints=sorted(states),
        exported=exported == (last_step or num_steps) and not damages,
        last_step=last_step,
    )
    if fault := foreign_rollouts(files, (line.get("run_id") for line in evidence.rollouts)):
        faults.append(str(fault))
    return evidence, faults


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Values of a config.json. A missing value or one of another kind raises InvalidValue."""

    path: Path
    config: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Settings:
        return cls(path=path, config=read_config(path))

    def value(self, name: str) -> Any:
        """Return the value of a field such as "data.shuffle"."""
        found: Any = self.config
        for part in name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise InvalidValue(
                    f"{self.path}: {name}",
                    rule="it is missing, so the file was edited or written by another version of "
                    "rlsys",
                    fix="Restore the file from a copy, or from the newest config-*.json next to "
                    "it.",
                )
            found = found[part]
        return found

    def number(self, name: str, *, at_least: int = 1) -> int:
        found = self.value(name)
        if type(found) is not int or found < at_least:
            raise InvalidValue(
                f"{self.path}: {name}",
                found,
                rule=f"must be an integer of at least {at_least}, so the file was edited",
                fix="Restore the file from a copy, or from the newest config-*.json next to it.",
            )
        return found


def _is_not_empty(path: Path) -> bool:
    return path.exists() and (not path.is_file() or path.stat().st_size > 0)


def _events(path: Path, faults: list[str]) -> list[Event]:
    try:
        return read_events(path)
    except (OSError, ValueError) as error:
        faults.append(f"{path.name} cannot be read: {error}")
        return []


def _external(path: Path, faults: list[str]) -> Mapping[int, SharedGroup | None]:
    try:
        return read_external(path)
    except (OSError, ValueError) as error:
        faults.append(f"{path.name} cannot be read: {error}")
        return {}


def _lines(path: Path, wrong: Callable[[Line], str | None], faults: list[str]) -> Iterator[Line]:
    """Yield the lines up to the first that cannot be read or is `wrong`, and report that one."""
    try:
        for number, line in enumerate(read_lines(path), start=1):
            if fault := wrong(line):
                raise ValueError(f"line {number} {fault}")
            yield line
    except (OSError, ValueError) as error:
        faults.append(f"{path.name} cannot be read: {error}")
