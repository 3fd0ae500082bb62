"""The audit finds every damage to a good history.

Each mutation decides whether it damages a history: removing a `resumed` that took nothing back, for
instance, leaves another good history.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys import metrics
from rlsys.commands import audit_command
from rlsys.errors import NOT_GIVEN
from rlsys.runs.audit import Evidence, audit
from rlsys.runs.export_seal import seal_export
from rlsys.runs.run_history import read_evidence
from rlsys.types import INJECTED
from tests.errors import invalid
from tests.histories import GROUP_SIZE, RUN_ID, made_up_run, text, with_external_groups, write_run
from tests.tiers import examples

ROOT = Path(__file__).parents[2]

# Changes the evidence in place, at a place of its choice; False where there is nothing to change.
Mutation = Callable[[Any, random.Random], bool]


def ledger_of(*prompts: int | str) -> Any:
    """A group for each number, a prompt left out for each text."""
    events: list[dict[str, Any]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            events.append({"event": "skipped", "prompt": int(prompt), "reason": "retired"})
        else:
            num = sum(event["event"] == "issued" for event in events)
            events.append({"event": "issued", "group": num, "prompt": prompt, "version": 0})
    return events


@pytest.mark.parametrize(
    ("prompts", "retires", "fault"),
    [
        ((0, "1", 2), True, None),
        ((0, "1", 2), False, "prompt 1 is skipped, and data.retire_at is not set"),
        ((0, "1", 3), True, "group 1 has prompt 3 where prompt 2 follows"),
        ((0, "1", 1), True, "group 1 has prompt 1 where prompt 2 follows"),
    ],
)
def test_prompts_that_are_left_out_are_accounted_for(
    prompts: tuple[int | str, ...], retires: bool, fault: str | None
) -> None:
    evidence = replace(
        made_up_run(0),
        events=ledger_of(*prompts),
        metrics=[],
        rollouts=[],
        checkpoints=[],
        exported=False,
        retires=retires,
    )
    found = [one.split(": ")[-1] for one in audit(evidence).faults if "prompt" in one]
    assert found == ([fault] if fault else [])


def surviving(evidence: Evidence) -> list[int]:
    """Positions of the `trained` events that no resume took back."""
    by_step: dict[int, int] = {}
    for position, event in enumerate(evidence.events):
        if event["event"] == "trained":
            by_step[event["step"]] = position
        if event["event"] == "resumed":
            by_step = {step: p for step, p in by_step.items() if step <= event["step"]}
    return list(by_step.values())


def pick(kind: str, evidence: Evidence, chance: random.Random) -> int | None:
    found = [p for p, event in enumerate(evidence.events) if event["event"] == kind]
    return chance.choice(found) if found else None


def lost(kind: str) -> Mutation:
    def mutate(evidence: Any, chance: random.Random) -> bool:
        position = pick(kind, evidence, chance)
        if position is None:
            return False
        del evidence.events[position]
        return True

    return mutate


def repeated(kind: str) -> Mutation:
    def mutate(evidence: Any, chance: random.Random) -> bool:
        position = pick(kind, evidence, chance)
        if position is None:
            return False
        evidence.events.insert(position, dict(evidence.events[position]))
        return True

    return mutate


def lost_step(evidence: Any, chance: random.Random) -> bool:
    del evidence.events[chance.choice(surviving(evidence))]
    return True


def group_trained_twice(evidence: Any, chance: random.Random) -> bool:
    first, second = chance.sample(surviving(evidence), 2)
    evidence.events[second]["groups"][0] = evidence.events[first]["groups"][0]
    return True


def short_step(evidence: Any, chance: random.Random) -> bool:
    event = evidence.events[chance.choice(surviving(evidence))]
    event["groups"].pop()
    event["oldest_versions"].pop()
    return True


def version(shift: Callable[[Evidence], int]) -> Mutation:
    def mutate(evidence: Any, chance: random.Random) -> bool:
        event = evidence.events[chance.choice(surviving(evidence))]
        event["oldest_versions"][0] = event["step"] - 1 + shift(evidence)
        return True

    return mutate


def other_prompt(evidence: Any, chance: random.Random) -> bool:
    position = pick("issued", evidence, chance)
    assert position is not None
    evidence.events[position]["prompt"] += chance.choice([-1, 1])
    return True


def resumed_too_far(evidence: Any, chance: random.Random) -> bool:
    position = pick("resumed", evidence, chance)
    if position is None:
        return False
    evidence.events[position]["step"] = evidence.num_steps + 1
    return True


def lost_weights(evidence: Any, chance: random.Random) -> bool:
    """A group sampled after the checkpoint continues without being sampled again."""
    versions: dict[int, int] = {}
    for position, event in enumerate(evidence.events):
        if event["event"] in ("issued", "reissued"):
            group = event["group"]
            then = next(
                (
                    later["event"]
                    for later in evidence.events[position + 1 :]
                    if later.get("group") == group or group in later.get("groups", ())
                ),
                None,
            )
            if (
                event["event"] == "reissued"
                and versions[group] > event["version"]
                and then == "trained"
            ):
                del evidence.events[position]
                return True
            versions[group] = event["version"]
    return False


def lost_line(evidence: Any, chance: random.Random) -> bool:
    del evidence.metrics[chance.randrange(len(evidence.metrics))]
    return True


def repeated_line(evidence: Any, chance: random.Random) -> bool:
    place = chance.randrange(len(evidence.metrics))
    evidence.metrics.insert(place, evidence.metrics[place])
    return True


def other_number(name: str) -> Mutation:
    def mutate(evidence: Any, chance: random.Random) -> bool:
        chance.choice(evidence.metrics)[name] += 1
        return True

    return mutate


def lost_rollout(evidence: Any, chance: random.Random) -> bool:
    del evidence.rollouts[chance.randrange(len(evidence.rollouts))]
    return True


def lost_rollouts(evidence: Any, chance: random.Random) -> bool:
    group = chance.choice(evidence.rollouts)["group_id"]
    evidence.rollouts[:] = [r for r in evidence.rollouts if r["group_id"] != group]
    return True


def repeated_rollout(evidence: Any, chance: random.Random) -> bool:
    place = chance.randrange(len(evidence.rollouts))
    evidence.rollouts.insert(place, evidence.rollouts[place])
    return True


def recorded(change: Callable[[Evidence, dict[str, Any]], None]) -> Mutation:
    def mutate(evidence: Any, chance: random.Random) -> bool:
        change(evidence, chance.choice(evidence.rollouts))
        return True

    return mutate


def old_token(evidence: Evidence, record: dict[str, Any]) -> None:
    record["policy_versions"][0] = record["step"] - 2 - evidence.max_staleness


def token_from_the_future(evidence: Evidence, record: dict[str, Any]) -> None:
    record["policy_versions"][-1] = record["step"]


def trained_baseline(evidence: Evidence, record: dict[str, Any]) -> None:
    record["is_greedy"] = True


def missing_version(evidence: Evidence, record: dict[str, Any]) -> None:
    record["policy_versions"].pop()


def other_staleness(evidence: Evidence, record: dict[str, Any]) -> None:
    record["staleness"] += 1


def other_text(evidence: Evidence, record: dict[str, Any]) -> None:
    record["prompt"] = "prompt of another"


def other_group(evidence: Evidence, record: dict[str, Any]) -> None:
    record["group_id"] += 1


def other_step(evidence: Evidence, record: dict[str, Any]) -> None:
    record["step"] += 1


MUTATIONS: dict[str, Mutation] = {
    "an issue is lost": lost("issued"),
    "an issue is repeated": repeated("issued"),
    "a drop is lost": lost("dropped"),
    "a drop is repeated": repeated("dropped"),
    "a step is repeated": repeated("trained"),
    "a step is lost": lost_step,
    "a step is short": short_step,
    "a group is trained twice": group_trained_twice,
    "a group is too old": version(lambda evidence: -1 - evidence.max_staleness),
    "a group comes from the future": version(lambda evidence: 1),
    "a prompt is another": other_prompt,
    "a resume goes forward": resumed_too_far,
    "lost weights sampled a group": lost_weights,
    "a line is lost": lost_line,
    "a line is repeated": repeated_line,
    "metrics count other rollouts": other_number("rollouts/trained"),
    "metrics have other staleness": other_number("staleness/max"),
    "metrics have another version": other_number("policy_version"),
    "a rollout is lost": lost_rollout,
    "a group's rollouts are lost": lost_rollouts,
    "a rollout is repeated": repeated_rollout,
    "a token is too old": recorded(old_token),
    "a token comes from the future": recorded(token_from_the_future),
    "a token has no version": recorded(missing_version),
    "a rollout has other staleness": recorded(other_staleness),
    "a rollout has another prompt": recorded(other_text),
    "a rollout is of another group": recorded(other_group),
    "a rollout is of another step": recorded(other_step),
    "a greedy baseline is trained on": recorded(trained_baseline),
}


@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 2**32), max_staleness=st.integers(0, 4))
def test_a_good_history_is_found_good(seed: int, max_staleness: int) -> None:
    verdict = audit(made_up_run(seed, max_staleness=max_staleness))
    assert verdict.faults == []
    assert verdict.finished


@pytest.mark.parametrize("name", MUTATIONS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), max_staleness=st.integers(0, 4))
def test_every_damage_is_found(name: str, seed: int, max_staleness: int) -> None:
    evidence = copy.deepcopy(made_up_run(seed, max_staleness=max_staleness))
    if MUTATIONS[name](evidence, random.Random(seed)):
        assert audit(evidence).faults


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_damage_is_tried(name: str) -> None:
    """Above, a mutation that finds nothing to change passes."""
    done = [
        MUTATIONS[name](copy.deepcopy(made_up_run(seed)), random.Random(seed)) for seed in range(40)
    ]
    assert sum(done) >= 10


def test_a_greedy_baseline_has_no_token_that_is_trained_on() -> None:
    """And what has none is one: a version that no policy has is a fault in any other record."""
    evidence: Any = copy.deepcopy(made_up_run(3, max_staleness=0))
    last = [record for record in evidence.rollouts if record["index"] == GROUP_SIZE - 1]
    for record in last:
        record |= {"is_greedy": True, "staleness": 0, "policy_versions": [INJECTED] * 4}
    assert audit(evidence).faults == []
    last[0]["is_greedy"] = False
    assert audit(evidence).faults


def test_an_episode_may_have_injected_tokens_and_parallel_branches() -> None:
    evidence: Any = copy.deepcopy(made_up_run(3, max_staleness=1))
    record = next(one for one in evidence.rollouts if one["step"] == 3)
    version = record["policy_versions"][0]
    record["policy_versions"] = [version, INJECTED, version, version]
    assert audit(evidence).faults  # of a completion
    record["turns"] = [{"branch": 0}]
    assert audit(evidence).faults == []
    record["policy_versions"] = [2, INJECTED, 1, 2]
    record["staleness"] = 1
    assert any("go back" in fault for fault in audit(evidence).faults)
    record["turns"] = [{"branch": 0}, {"branch": 1}]
    assert not any("go back" in fault for fault in audit(evidence).faults)


def test_an_unfinished_run_may_lack_the_last_line_and_its_ends() -> None:
    evidence = made_up_run(3)
    last = max(surviving(evidence))
    cut = replace(
        evidence,
        events=evidence.events[: last + 1],
        metrics=evidence.metrics[:-1],
        rollouts=[r for r in evidence.rollouts if r["step"] < evidence.num_steps],
        checkpoints=[],
        exported=False,
    )
    verdict = audit(cut)
    assert verdict.faults == []
    assert not verdict.finished
    assert audit(replace(cut, metrics=evidence.metrics[:-2])).faults


def test_prompts_out_of_the_seeds_order_are_found_where_an_epoch_comes_round() -> None:
    """Two rows of the data change places from the second epoch on."""
    evidence = copy.deepcopy(made_up_run(5))
    swapped = {"prompt 0": "prompt 1", "prompt 1": "prompt 0"}
    for record in list(evidence.rollouts)[len(evidence.rollouts) // 2 :]:
        record["prompt"] = swapped.get(record["prompt"], record["prompt"])  # type: ignore[index]
    assert any(
        "prompt 0" in fault and "prompt 1" in fault and "group" in fault
        for fault in audit(evidence).faults
    )


@pytest.mark.parametrize("seed", range(5))
def test_groups_of_other_runs_match_the_external_log(seed: int) -> None:
    good = with_external_groups(made_up_run(seed))
    assert audit(good).faults == []
    place = next(i for i, record in enumerate(good.rollouts) if "shared_by" in record)
    prompt = int(good.rollouts[place]["prompt"].split()[1])

    def faults(**changes: Any) -> str:
        evidence = copy.deepcopy(good)
        evidence.rollouts[place].update(changes)  # type: ignore[attr-defined]
        return " ".join(audit(evidence).faults)

    assert "is of c, external.jsonl has one of b" in faults(shared_by="c")
    assert "is of the run itself, external.jsonl has one of b" in faults(shared_by="")
    assert "external.jsonl has another completion" in faults(completion="other")
    first = good.external[prompt]
    assert first is not None

    def edited(**changes: Any) -> str:
        """external.jsonl, not rollouts.jsonl."""
        external = {**good.external, prompt: replace(first, **changes)}
        return " ".join(audit(replace(good, external=external)).faults)

    assert "external.jsonl has another row" in edited(row={"answer": int(first.row["answer"])})
    assert "external.jsonl has another prompt" in edited(asked="other")
    cut = [replace(completion, truncated=True) for completion in first.completions]
    assert "external.jsonl has another finish_reason" in edited(completions=cut)
    assert "external.jsonl has another number of rollouts" in edited(completions=[])
    for twice in (first, replace(first, peer="copy")):
        evidence = replace(good, external={**good.external, 2: twice})
        assert any("2 times" in fault for fault in audit(evidence).faults)
    assert any("has one of the run" in fault for fault in audit(replace(good, external={})).faults)


def test_evidence_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    evidence = made_up_run(1)
    for name, one in (("alone", evidence), ("swarm", with_external_groups(evidence))):
        write_run(one, tmp_path / name)
        read, unreadable = read_evidence(tmp_path / name)
        assert unreadable == []
        assert read == one


def test_the_newest_run_is_audited_unless_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(made_up_run(2), tmp_path / "runs" / "one")
    monkeypatch.chdir(tmp_path)
    assert audit_command.main([]) == 0
    assert capsys.readouterr().out.startswith(f"{Path('runs/one')}, finished: ")
    with invalid("RUN", "runs/other"):
        audit_command.main(["runs/other"])


def run_audit(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlsys", "audit", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_command_prints_faults(tmp_path: Path) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    good = run_audit(files.path)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "finished: 12 of 12 steps" in good.stdout
    assert "nothing broken" in good.stdout

    lines = files.metrics.read_text().splitlines(keepends=True)
    files.metrics.write_text("".join(lines[:3] + lines[4:]))
    (weights,) = files.checkpoints.glob("step_000012/trainer/weights")
    weights.write_text("others")
    broken = run_audit(files.path)
    assert broken.returncode == 1
    assert "broken: metrics.jsonl has 11 lines, of steps 1 to 12, not one for each" in broken.stdout
    assert "broken: checkpoint step_000012 is damaged: trainer/weights has 6 bytes" in broken.stdout


def test_the_command_counts_similar_faults(tmp_path: Path) -> None:
    """The rollouts of another run, each in a step that did not train its group."""
    files = write_run(made_up_run(2), tmp_path / "run")
    lines = [json.loads(line) for line in files.rollouts.read_text().splitlines()]
    others = [{**line, "group_id": line["group_id"] + 1000} for line in lines]
    files.rollouts.write_text("".join(text(others)))
    broken = run_audit(files.path).stdout.splitlines()
    foreign = [line for line in broken if "but that step did not train the group" in line]
    assert foreign[0].startswith("broken: rollouts.jsonl: rollout 0 of group 1")
    more = f"broken: and {len(lines) - 3} more "
    assert foreign[3].startswith(more)
    assert len(foreign) == 4
    kinds = ("that step did not", "lacks group", "records that changed")
    assert all(any(kind in line for kind in kinds) for line in broken[:-1])
    evidence, unreadable = read_evidence(files.path)
    num_faults = len([*unreadable, *audit(evidence).faults])
    assert num_faults > len(lines)
    assert broken[-1].endswith(f"; {num_faults} broken")


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl", "rollouts.jsonl"])
@pytest.mark.parametrize("damage", ["missing", "no json", "no event"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, damage: str) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    path = files.path / name
    if damage == "missing":
        path.unlink()
    else:
        with path.open("a") as file:
            file.write("nonsense\n" if damage == "no json" else json.dumps({"step": 12}) + "\n")
    evidence, unreadable = read_evidence(files.path)
    assert any(name.partition(".")[0] in fault for fault in [*unreadable, *audit(evidence).faults])


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """The first JSON line of a file."""
    first, *rest = path.read_text().splitlines(keepends=True)
    entry = json.loads(first)
    change(entry)
    path.write_text("".join([json.dumps(entry) + "\n", *rest]))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("policy_versions", None, "line 1 has policy_versions=null, which is not a list of int"),
        ("policy_versions", [0, "1"], "which is not a list of integers"),
        ("token_ids", 3, "line 1 has token_ids=3, which is not a list of integers"),
        ("staleness", "0", 'staleness="0", which is not of type int'),
    ],
)
def test_a_record_of_other_kinds_is_named(
    tmp_path: Path, field: str, value: Any, words: str
) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    edit(files.rollouts, lambda record: record.update({field: value}))
    evidence, unreadable = read_evidence(files.path)
    assert any(words in fault for fault in unreadable)
    audit(evidence)


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    edit(files.metrics, lambda line: line.update({metrics.STALENESS_MAX: None}))
    evidence, unreadable = read_evidence(files.path)
    assert any("has null for staleness/max" in fault for fault in unreadable)
    audit(evidence)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        (lambda c: c.pop("observe"), "observe.record_groups", NOT_GIVEN),
        (lambda c: c.update(asynchrony=3), "asynchrony.max_staleness", NOT_GIVEN),
        (lambda c: c.update(num_steps="12"), "num_steps", "12"),
        (lambda c: c.update(prompts_per_step=0), "prompts_per_step", 0),
    ],
)
def test_a_configuration_that_was_edited_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], field: str, value: Any
) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    edit(files.config, lambda entry: change(entry["config"]))
    with invalid(f"{files.config}: {field}", value):
        read_evidence(files.path)


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl", "rollouts.jsonl"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    (files.path / name).unlink()
    os.mkfifo(files.path / name)
    _, unreadable = read_evidence(files.path)
    assert any(f"{name}: is not a regular file" in fault for fault in unreadable)


def test_a_pipe_for_a_configuration_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with invalid(str(tmp_path / "config.json")):
        read_evidence(tmp_path)


@pytest.mark.parametrize("ledger", [None, ""])
def test_a_run_that_failed_while_it_started_has_no_step_and_no_fault(
    tmp_path: Path, ledger: str | None
) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    for entry in files.path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry != files.config:
            entry.unlink()
    if ledger is not None:
        files.ledger.write_text(ledger)
    evidence, unreadable = read_evidence(files.path)
    verdict = audit(evidence)
    assert [*unreadable, *verdict.faults] == []
    assert not verdict.finished
    assert verdict.summary == "none of 12 steps; it ended before it issued a group"


def test_the_summary_counts_in_words(tmp_path: Path) -> None:
    evidence, _ = read_evidence(write_run(made_up_run(2), tmp_path / "run").path)
    one = replace(evidence, checkpoints=evidence.checkpoints[:1])
    assert audit(one).summary.endswith(", 1 undamaged checkpoint")
    none = replace(evidence, checkpoints=())
    assert audit(none).summary.endswith(", 0 undamaged checkpoints")


def test_an_incomplete_model_is_found(tmp_path: Path) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    (files.hf / "model.safetensors").unlink()
    evidence, unreadable = read_evidence(files.path)
    assert unreadable == ["hf/, the model of step 12, is damaged: model.safetensors is missing"]
    assert not audit(evidence).finished


def test_a_step_of_the_model_that_was_changed_is_found(tmp_path: Path) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    sealed = (files.hf / "exported.json").read_text()
    (files.hf / "exported.json").write_text(sealed.replace("12", "13", 1))
    (fault,) = read_evidence(files.path)[1]
    assert str(files.hf / "exported.json") in fault
    assert not files.has_finished(13)
    assert not files.has_finished(12)


def test_the_model_of_another_run_is_found(tmp_path: Path) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    seal_export(files.hf, 12, run_id="other")
    evidence, (fault,) = read_evidence(files.path)
    assert "hf/" in fault
    assert '"other"' in fault
    assert f'"{RUN_ID}"' in fault
    assert not files.has_finished(12)
    assert not audit(evidence).finished


@pytest.mark.parametrize("run_id", [None, "", 7])
def test_a_run_without_an_id_is_refused(tmp_path: Path, run_id: Any) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    edit(files.config, lambda entry: entry.update(run_id=run_id))
    with invalid(f"{files.config}: run_id", run_id):
        read_evidence(files.path)
    edit(files.config, lambda entry: entry.pop("run_id"))
    with invalid(f"{files.config}: run_id", None):
        read_evidence(files.path)


def test_an_id_that_is_not_that_of_all_rollouts_is_found(tmp_path: Path) -> None:
    """Also of lines that no checkpoint knows."""
    files = write_run(made_up_run(2), tmp_path / "run")
    shutil.rmtree(files.checkpoints / "step_000012")
    first, *rest = files.rollouts.read_text().splitlines(keepends=True)
    rest[-1] = rest[-1].replace(RUN_ID, "other")
    files.rollouts.write_text("".join([first, *rest]))
    shutil.copyfile(files.config, files.path / "config-1.json")
    (fault,) = read_evidence(files.path)[1]
    assert fault.startswith(f"{files.config}: run_id={RUN_ID!r}")
    assert 'run_id="other"' in fault
    edit(files.config, lambda entry: entry.update(run_id="other"))
    faults = read_evidence(files.path)[1]
    assert "config-1.json has another run_id than config.json" in faults
    assert any(f'run_id="{RUN_ID}"' in fault for fault in faults)


def test_weights_that_other_models_began_with_are_looked_at(tmp_path: Path) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    weights = files.checkpoints / ".beginning"
    (weights / "weights").write_text("as taughT")
    (fault,) = read_evidence(files.path)[1]
    assert fault.startswith(f"{weights}: it is damaged: weights")
    shutil.rmtree(weights)
    (fault,) = read_evidence(files.path)[1]
    assert fault.startswith(f"{weights}: it is missing")


@pytest.mark.parametrize("target", ["nowhere", "config-1.json"])
def test_a_former_configuration_that_leads_nowhere_is_refused(tmp_path: Path, target: str) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    (files.path / "config-1.json").symlink_to(target)
    with invalid(str(files.path / "config-1.json")):
        read_evidence(files.path)


def test_a_rollout_that_is_there_twice_at_the_end_of_an_unfinished_run_is_named() -> None:
    """Where groups may still lack rollouts."""
    evidence = replace(made_up_run(2), exported=False)
    assert audit(evidence).faults == []
    assert audit(replace(evidence, rollouts=evidence.rollouts[:-1])).faults == []
    last = evidence.rollouts[-1]
    assert audit(replace(evidence, rollouts=[*evidence.rollouts, last])).faults == [
        f"rollouts.jsonl: rollout {last['index']} of group {last['group_id']} in step "
        f"{last['step']} is there twice"
    ]


def test_records_that_a_checkpoint_does_not_know_are_found(tmp_path: Path) -> None:
    """No other rule checks the completion's text."""
    files = write_run(made_up_run(2), tmp_path / "run")
    edit(files.rollouts, lambda record: record.update(completion="sword"))
    _, unreadable = read_evidence(files.path)
    assert unreadable
    for fault in unreadable:
        assert "rollouts.jsonl" in fault


@pytest.mark.parametrize("damage", ["rewards", "row", "doubled", "cut", "missing", "binary"])
def test_an_external_log_that_was_changed_is_found(tmp_path: Path, damage: str) -> None:
    files = write_run(with_external_groups(made_up_run(2)), tmp_path / "run")
    whole = files.external.read_bytes()
    match damage:
        case "rewards":
            edit(files.external, lambda line: line["group"].update(rewards=[1.0, 0.0]))
        case "row":
            edit(files.external, lambda line: line["group"].update(row={"answer": "1"}))
        case "doubled":
            files.external.write_bytes(whole * 2)
        case "cut":
            files.external.write_bytes(whole[: len(whole) // 2])
        case "missing":
            files.external.unlink()
        case "binary":
            files.external.write_bytes(bytes(range(256)))
    evidence, unreadable = read_evidence(files.path)
    audit(evidence)
    assert any("external.jsonl" in fault for fault in unreadable)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    result = run_audit(tmp_path)
    assert result.returncode == 1
    assert str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr


def test_lost_checkpoints_are_found(tmp_path: Path) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    files.checkpointed.write_text("step_000004\n")
    assert read_evidence(files.path)[1] == []
    for directory in (files.checkpoints, files.hf):
        shutil.rmtree(directory)
    (fault,) = read_evidence(files.path)[1]
    assert "step_000004" in fault


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_an_entry_that_a_file_cannot_replace_is_found(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    make(files.checkpointed)
    (fault,) = read_evidence(files.path)[1]
    assert fault.startswith(f"{files.checkpointed}: ")


def test_a_line_that_nests_too_deeply_is_a_fault(tmp_path: Path) -> None:
    files = write_run(made_up_run(2), tmp_path / "run")
    with files.rollouts.open("ab") as file:
        file.write(b"[" * 100_000 + b"\n")
    faults = read_evidence(files.path)[1]
    assert any("nested too deeply" in fault for fault in faults)


def test_metrics_count_staleness_in_updates_of_the_weights() -> None:
    """Two updates a step: the oldest token is part of the first of them, or of the second."""
    run, name = made_up_run(3), metrics.STALENESS_MAX
    for beyond, num_faults in ((0, 0), (1, 0), (2, len(run.metrics))):
        lines = [{**line, name: 2 * line[name] + beyond} for line in run.metrics]
        verdict = audit(replace(run, metrics=lines, updates_per_step=2))
        assert len(verdict.faults) == num_faults
