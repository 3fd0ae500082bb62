"""What the files of a run say about its past.

    checkpoints ─ controller.json ─► State         ─► rlsys.runs.resume
    all files                     ─► read_evidence ─► rlsys.runs.audit

A checkpoint's state says how much of each file of records was there when it was written (Tally),
so that a resume and an audit can tell whether it still is. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys import metrics
from rlsys.common.append_only_file import Tally, regular_file
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.data.swarm.external_log import read_external
from rlsys.data.swarm.shared_pool import SharedGroup
from rlsys.dataflow.scheduling.ledger import Event, read_events
from rlsys.runs.audit import Evidence
from rlsys.runs.checkpoint import Checkpoint, beginning_fault, find_checkpoints
from rlsys.runs.evaluation_log import damages_of, losses_of
from rlsys.runs.export_seal import EXPORTED_FILE, export_faults, exported_step
from rlsys.runs.observe.step_log import read_lines
from rlsys.runs.run_directory import (
    RunFiles,
    checkpointed_fault,
    foreign_rollouts,
    lost_checkpoints,
    read_config,
    read_run_id,
)

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class State:
    """What a checkpoint's controller.json holds."""

    step: int
    prompts: Mapping[str, int]  # PromptSource.order
    records: Mapping[str, Tally]  # what stood in each of RunFiles.records, by its name
    external: Tally | None = None  # what stood in external.jsonl, where there is one
    coefficients: Mapping[str, float] = field(default_factory=dict)  # by stage
    retired: Sequence[int] = ()  # rows of the data that are not issued again
    beginning: str | None = None  # of Checkpoints.seal_taught, where other models began with it

    def to_dict(self) -> dict[str, Any]:
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
    """Raises ValueError, with the fix, for one that does not belong to its checkpoint."""
    try:
        entry = parse_json(regular_file(checkpoint.controller_file).read_bytes())
        if entry["step"] != checkpoint.step:
            raise ValueError(f"it is of step {entry['step']}")
        prompts = {name: entry["prompts"][name] for name in ("seed", "num_prompts")}
        if "checksum" in entry["prompts"]:  # which earlier versions did not write
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
        raise ValueError(
            f"{checkpoint.controller_file} does not belong to its checkpoint "
            f"({type(error).__name__}: {error}): it was edited, or written by another version of "
            "rlsys"
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
    """What is wrong with the records that a checkpoint builds on."""
    begun = [(path, state.records[path.name]) for path in files.records]
    if state.external is not None:
        begun.append((files.external, state.external))
    return [f"{path.name} {fault}" for path, tally in begun if (fault := tally.fault(path))]


def some(faults: Sequence[str]) -> str:
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return ", ".join(faults[:3]) + more


def read_evidence(path: Path) -> tuple[Evidence, list[str]]:
    """What an audit looks at, and what of it could not be read.

    Raises ValueError where there is no run's config.json to go by, or it has no run_id.
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
            faults.append(f"{name} is damaged: {some(broken)}")
            continue
        try:
            state = states[checkpoint.step] = read_state(checkpoint)
        except ValueError as error:
            faults.append(str(error))
        else:
            faults += [f"{name} builds on what is gone: {f}" for f in record_faults(state, files)]
    for seal in {state.beginning for state in states.values()}:
        if fault := beginning_fault(files.checkpoints, seal):
            faults.append(fault)
    faults += damages_of(files) or losses_of(files)
    exported = exported_step(files.hf)
    if fault := checkpointed_fault(files):
        faults.append(fault)
    if not checkpoints and exported is None and (lost := lost_checkpoints(files)):
        faults.append(lost)
    if exported is None and (files.hf / EXPORTED_FILE).exists():
        faults.append(f"{files.hf / EXPORTED_FILE} is damaged, which says of which step hf/ is")
    damages = [] if exported is None else export_faults(files.hf, run_id=run_id)
    faults += [f"hf/, the model of step {exported}, is damaged: {f}" for f in damages]
    # A run that failed while it started has written none of them.
    has_begun = bool(states) or any(_holds_something(record) for record in files.records)
    updates = settings.number("trainer.num_minibatches") * settings.number("trainer.num_epochs")
    recorded = {one.number("observe.record_groups", at_least=0) for one in (settings, *former)}
    evidence = Evidence(
        groups_per_step=settings.number("prompts_per_step"),
        group_size=settings.number("group_size"),
        # In versions, of which each has several updates where a step has.
        max_staleness=(settings.number("asynchrony.max_staleness", at_least=0) + 1) // updates - 1,
        updates_per_step=updates,
        num_steps=settings.number("num_steps"),
        recorded_groups=recorded.pop() if len(recorded) == 1 else None,
        shuffle=bool(settings.value("data.shuffle")),
        injects=settings.value("sampling.interrupt_after") is not None
        or settings.value("data.chat_template") is True,  # a dataset's chats have other turns
        retires=settings.value("data.retire_at") is not None,
        prompt_order=states[max(states)].prompts if states else None,
        events=_events(files.ledger, faults) if has_begun else [],
        external=_external(files.external, faults),
        metrics=list(_lines(files.metrics, _no_metrics, faults)) if has_begun else [],
        rollouts=list(_lines(files.rollouts, _no_record, faults)) if has_begun else [],
        checkpoints=sorted(states),
        exported=exported == settings.number("num_steps") and not damages,
    )
    if fault := foreign_rollouts(files, (line.get("run_id") for line in evidence.rollouts)):
        faults.append(fault)
    return evidence, faults


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """A config.json. Reading one that lacks a value, or has one of another kind, raises
    ValueError.
    """

    path: Path
    config: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Settings:
        return cls(path=path, config=read_config(path))

    def value(self, name: str) -> Any:
        """Of a field such as "data.shuffle"."""
        found: Any = self.config
        for part in name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise ValueError(
                    f"{self.path} has no {name}, which every run's has: it was edited, or written "
                    "by another version of rlsys. Restore it from a copy, or from the newest "
                    "config-*.json beside it."
                )
            found = found[part]
        return found

    def number(self, name: str, *, at_least: int = 1) -> int:
        found = self.value(name)
        if type(found) is not int or found < at_least:
            raise ValueError(
                f"{self.path} has {name}={dump_json(found)} where an integer of at least "
                f"{at_least} belongs: it was edited. Restore it from a copy, or from the newest "
                "config-*.json beside it."
            )
        return found


def _holds_something(path: Path) -> bool:
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
    """Up to the first that cannot be read or is `wrong`, which joins `faults`."""
    try:
        for number, line in enumerate(read_lines(path), start=1):
            if fault := wrong(line):
                raise ValueError(f"line {number} {fault}")
            yield line
    except (OSError, ValueError) as error:
        faults.append(f"{path.name} cannot be read: {error}")


def _no_metrics(line: Line) -> str | None:
    wrong = [name for name, value in line.items() if type(value) not in (int, float)]
    return f"has {dump_json(line[wrong[0]])} for {wrong[0]}, which is no number" if wrong else None


# What an audit reads of a rollout.
KINDS = {
    metrics.STEP: int,
    "group_id": int,
    "index": int,
    "prompt": str,
    "token_ids": list,
    "policy_versions": list,
    "staleness": int,
}


def _no_record(line: Line) -> str | None:
    for name, kind in KINDS.items():
        value = line.get(name)
        is_one = type(value) is kind
        if is_one and kind is list:
            is_one = all(type(item) is int for item in line[name])
        if not is_one:
            what = "a list of integers" if kind is list else f"of type {kind.__name__}"
            return f"has {name}={dump_json(value)[:40]}, which is not {what}"
    return None
