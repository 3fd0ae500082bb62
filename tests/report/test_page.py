"""The report page as a file, and its live server, without a browser."""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.report import write_report
from rlsys.report.live_page import ReportServer
from rlsys.report.page import safe_json
from rlsys.runs.run_directory import RunDirectory
from rlsys.runs.run_outcome import read_outcome, write_outcome
from tests.errors import invalid
from tests.report.synthetic_runs import Episode, SyntheticRun, write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028&amp;\ud800"


class Tags(HTMLParser):
    """Tags of a page with their attributes, and the contents of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


def model_of(page: Path) -> dict[str, Any]:
    (text,) = re.findall(r'id="model">(.*?)</script>', page.read_text(), re.DOTALL)
    model: dict[str, Any] = parse_json(text)
    return model


def test_a_page_holds_the_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", SyntheticRun(evaluations=lambda step: 0.5))
    page = write_report([path])
    assert page == path / "report.html"
    (run,) = model_of(page)["runs"]
    assert run["state"]["state"] == "finished"
    assert run["curves"]["steps"] == list(range(1, 61))
    assert len(run["groups"]) == 60
    assert [len(group["rollouts"]) for group in run["groups"]] == [4] * 60
    assert run["groups"][0]["rollouts"][0]["gaps"] == [-0.01, 0, 0.01]
    assert [stage["groups"] for stage in run["funnel"]["stages"]] == [241, 240, 240, 240]
    assert run["staleness"] == {"groups": {"0": 4, "1": 236}, "bound": 1}
    assert {row["field"] for row in run["config"] if row["changed"]} >= {"num_steps", "group_size"}
    assert run["forecast"]["steps"][-1] == 120
    assert (run["num_damaged"], run["left_out"]) == (0, [])
    assert run["timeline"]["num_spans"] == 180


def test_nothing_in_a_completion_is_markup(tmp_path: Path) -> None:
    episode = Episode(
        prompt=lambda group: HOSTILE,
        completion=lambda group, index: HOSTILE,
        turns=[{"role": HOSTILE, "text": HOSTILE, "sampled": True, "branch": 0}],
    )
    run = SyntheticRun(
        num_steps=2,
        episode=episode,
        reason=HOSTILE,
        outcome="failed",
        shape=lambda step, line: {f"own/{HOSTILE}": 1.0},
        changes={HOSTILE: HOSTILE},
    )
    page = write_report([write_run(tmp_path / "run", run)])
    plain = write_report([write_run(tmp_path / "plain", SyntheticRun(num_steps=2))])
    tags, others = Tags(page.read_text()), Tags(plain.read_text())
    assert [tag for tag, _ in tags.tags] == [tag for tag, _ in others.tags]
    assert not {"img", "iframe", "object"} & {tag for tag, _ in tags.tags}
    assert all("src" not in found for _, found in tags.tags)
    shown = model_of(page)["runs"][0]["groups"][0]["rollouts"][0]
    assert shown["completion"] == HOSTILE
    assert f"own/{HOSTILE}" in model_of(page)["runs"][0]["curves"]["series"]


def test_the_policy_allows_the_scripts_of_the_page_alone(tmp_path: Path) -> None:
    import base64
    import hashlib

    page = Tags(write_report([write_run(tmp_path / "run", SyntheticRun(num_steps=1))]).read_text())
    (policy,) = [
        str(found["content"])
        for tag, found in page.tags
        if tag == "meta" and found.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    assert rules["img-src"] == "data:"
    programs = [script for script in page.scripts if len(script) > 1000 and "uPlot" in script]
    allowed = [
        f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'"
        for one in programs
    ]
    assert rules["script-src"].split() == allowed
    assert len(allowed) == 2


@pytest.mark.parametrize(
    "character", ["<", ">", "&", "\u2028", "\u2029", "\ud800", '"', "\\", "\0"]
)
def test_json_between_script_tags_is_harmless_and_exact(character: str) -> None:
    text = safe_json({"x": character})
    assert parse_json(text) == {"x": character}
    assert not set("<>&\u2028\u2029") & set(text)
    text.encode()


def test_several_runs_are_compared(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a")
    second = write_run(
        tmp_path / "b",
        SyntheticRun(
            num_steps=20, changes={"seed": 7}, shape=lambda step, line: {"own/metric": 1.0}
        ),
    )
    model = model_of(write_report([first, second], tmp_path / "both.html"))
    assert [run["name"] for run in model["runs"]] == ["a", "b"]
    assert {"field": "seed", "values": ["0", "7"]} in model["differences"]
    assert "own/metric" not in model["runs"][0]["curves"]["series"]
    assert "own/metric" in model["runs"][1]["curves"]["series"]


def test_damaged_lines_are_shown_and_counted(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    for name in ("metrics", "rollouts", "ledger"):
        lines = (path / f"{name}.jsonl").read_text().splitlines(keepends=True)
        lines[3] = lines[3][:20] + "\n"
        (path / f"{name}.jsonl").write_text("".join(lines))
    (run,) = model_of(write_report([path]))["runs"]
    assert run["num_damaged"] == 3
    assert {(one["file"], one["line"]) for one in run["damages"]} == {
        ("metrics.jsonl", 4),
        ("rollouts.jsonl", 4),
        ("ledger.jsonl", 4),
    }
    assert len(run["curves"]["steps"]) == 59


def test_a_run_of_an_older_version_shows_what_it_has(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "config.json").write_text(dump_json({"config": {"num_steps": 60, "gone": {"x": 1}}}))
    (path / "metrics.jsonl").write_text(
        dump_json({"step": 1, "reward_mean": 0.5, "note": "x"}) + "\n"
    )
    (path / "rollouts.jsonl").write_text(dump_json({"step": 1, "group_id": 0, "text": "x"}) + "\n")
    for name in ("ledger.jsonl", "trace.json", "outcome.json"):
        (path / name).unlink()
    (run,) = model_of(write_report([path]))["runs"]
    assert run["state"]["state"] == "died"
    assert run["curves"]["series"]["reward_mean"] == [0.5]
    assert len(run["groups"]) == 1
    assert run["groups"][0]["rollouts"][0]["gaps"] == []
    assert run["num_damaged"] == 0


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "new", {"num_steps": 5}, required_bytes=0) as directory:
        (run,) = model_of(write_report([directory.path]))["runs"]
        assert run["state"]["state"] == "running"
    (run,) = model_of(write_report([directory.path]))["runs"]
    assert run["state"]["state"] == "died"


def test_the_outcome_lasts_until_the_run_is_resumed(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "new", {"num_steps": 5}, required_bytes=0) as directory:
        write_outcome(directory.outcome, "failed", reason="CUDA error: out of memory")
        found = read_outcome(directory.outcome)
        assert found is not None
        assert (found.outcome, found.reason) == ("failed", "CUDA error: out of memory")
        (run,) = model_of(write_report([directory.path]))["runs"]
        assert run["state"]["reason"] == "CUDA error: out of memory"
        directory.write_config({"num_steps": 5})
        assert read_outcome(directory.outcome) is None
    with RunDirectory.create(tmp_path, "new", {"num_steps": 5}, required_bytes=0) as directory:
        assert not (directory.path / "report.html").exists()  # what an earlier start has left


def test_mistakes_name_the_directory(tmp_path: Path) -> None:
    with invalid(str(tmp_path / "none" / "config.json")):
        write_report([tmp_path / "none"])
    with invalid("runs"):
        write_report([])
    path = write_run(tmp_path / "run", SyntheticRun(num_steps=1))
    with invalid("runs"):
        write_report([path, tmp_path / "." / "run"])
    with pytest.raises(OSError):  # noqa: PT011 - of the file system
        write_report([path], tmp_path / "none" / "report.html")


@pytest.mark.slow
def test_a_long_run_gives_a_small_page(tmp_path: Path) -> None:
    episode = Episode(completion=lambda group, index: "word " * 400, num_tokens=400)
    path = write_run(tmp_path / "run", SyntheticRun(num_steps=1500, episode=episode))
    page = write_report([path])
    assert page.stat().st_size < 5_000_000
    (run,) = model_of(page)["runs"]
    assert len(run["curves"]["steps"]) == 1000
    assert 20 < len(run["groups"]) < 1500
    assert len(run["left_out"]) == 2


@contextmanager
def serving(path: Path) -> Iterator[ReportServer]:
    with ReportServer(path, host="127.0.0.1", port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(
    server: ReportServer, path: str, **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def test_a_live_page_follows_the_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", SyntheticRun(num_steps=5, planned_steps=9, outcome=None))
    longer = write_run(tmp_path / "longer", SyntheticRun(num_steps=6))
    with RunDirectory(path), serving(path) as server:
        server.model._clock = iter(range(1000, 100_000, 2)).__next__
        status, page, _ = get(server, "/")
        assert status == 200
        assert "connect-src 'self'" in page
        _, text, headers = get(server, "/model.json")
        assert parse_json(text)["runs"][0]["curves"]["steps"] == [1, 2, 3, 4, 5]
        assert parse_json(text)["runs"][0]["state"]["state"] == "running"
        tag = headers["ETag"]
        assert get(server, "/model.json", **{"If-None-Match": tag})[0] == 304
        shutil.copy(longer / "metrics.jsonl", path / "metrics.jsonl")
        status, text, headers = get(server, "/model.json", **{"If-None-Match": tag})
        assert (status, headers["ETag"] != tag) == (200, True)
        assert parse_json(text)["runs"][0]["curves"]["steps"] == [1, 2, 3, 4, 5, 6]


def test_the_live_server_answers_its_own_names_alone(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", SyntheticRun(num_steps=1))
    with serving(path) as server:
        assert get(server, "/", Host="attacker.example")[0] == 403
        assert get(server, "/", Host=f"attacker.example:{server.server_port}")[0] == 403
        assert get(server, "/", Host=f"localhost:{server.server_port}")[0] == 200
        assert get(server, "/config.json")[0] == 404
        assert get(server, "/../config.json")[0] == 404


def test_an_occupied_port_is_an_error(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", SyntheticRun(num_steps=1))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with invalid("port", port):
            ReportServer(path, host="127.0.0.1", port=port)
    with invalid("port", 70000):
        ReportServer(path, host="127.0.0.1", port=70000)
    with invalid("host", "192.0.2.1"):
        ReportServer(path, host="192.0.2.1", port=0)
