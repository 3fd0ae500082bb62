"""Copies of a model to file systems of fsspec and to a hub, which is a local HTTP server."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rlsys.runs.export_seal import seal_export
from rlsys.runs.model_push import PushFailed, check_target, push, retry_command
from tests.errors import invalid

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "chat/one.jinja": b"{{ x }}"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "hf"
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    seal_export(directory, 12, run_id="own")
    return directory


def content_of(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def test_files_are_copied_to_a_file_system(model: Path, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    target = tmp_path / "store" / "new" / "model"
    push(model, f"file://{target}", lambda done, total: progress.append((done, total)))
    assert content_of(target) == content_of(model)
    total = sum(map(len, content_of(model).values()))
    assert progress[-1] == (total, total)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


Memory: Any = fsspec.get_filesystem_class("memory")


class Shelf(Memory):
    """An object store of this process."""

    protocol = "shelf"
    store: dict[str, Any] = {}  # noqa: RUF012, as in the class above

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("shelf://", "memory://")))


class Unreliable(Memory):
    """An object store that loses the end of each file."""

    protocol = "unreliable"
    store: dict[str, Any] = {}  # noqa: RUF012, as in the class above

    def size(self, path: str) -> int:
        return int(super().size(path)) - 1


for system in (Shelf, Unreliable):
    fsspec.register_implementation(system.protocol, system, clobber=True)


def test_files_are_copied_to_an_object_store(model: Path) -> None:
    """The manifest and the seal come last, so that they are missing from a partial copy."""
    push(model, "shelf://bucket/path")
    push(model, "shelf://bucket/path/")  # again, over the first
    store = fsspec.filesystem("shelf")
    assert {
        path.removeprefix("/bucket/path/"): store.cat_file(path)
        for path in store.find("/bucket/path")
    } == content_of(model)


def test_a_failure_names_the_cause_and_the_target(model: Path) -> None:
    with pytest.raises(PushFailed) as failed:
        push(model, "unreliable://bucket/path")
    assert "bytes there" in str(failed.value)


@pytest.mark.parametrize(
    "url",
    [
        "nothing://bucket",
        "hf://name",
        "hf://a/b/c",
        "hf://a/b c",
        "shelf://",
        "shelf:///",
        "http://host/path",  # cannot be written
        "https://host/path",
        "github://org:name@main/path",
        "data://text",
        "zip://path",
        "memory://bucket/path",  # ends with the process
        "simplecache://path",
        "file://relative/path",
        "local://relative",
        "file://",
    ],
)
def test_a_target_is_checked_before_the_run(url: str) -> None:
    with invalid("push_to", url):
        check_target(url)


@pytest.mark.parametrize("url", ["shelf://bucket", "shelf://bucket/path", "ftp://host/path"])
def test_stores_that_can_be_written_are_targets(url: str) -> None:
    check_target(url)


def test_a_directory_is_a_target_if_it_can_be_made(tmp_path: Path) -> None:
    check_target(f"file://{tmp_path}/new/model")
    (tmp_path / "occupied").write_text("a file")
    with invalid("push_to"):
        check_target(f"file://{tmp_path}/occupied/model")


def test_the_hub_needs_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with invalid("push_to"):
        check_target("hf://org/name")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "secret")
    check_target("hf://org/name")


class Hub(ThreadingHTTPServer):
    """The part of the hub that an upload uses: repositories, LFS objects, commits."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.created: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.committed: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.refuses = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def _answer(self, answer: Any, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_GET(self) -> None:
        self._answer({"error": "not found"}, 404)

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        hub.tokens.add(self.headers["Authorization"])
        if hub.refuses:
            self._answer({"error": "forbidden"}, 403)
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self._answer({"url": f"{hub.url}/org/name"})
        elif "/preupload/" in self.path:
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif self.path.endswith("/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._answer({"objects": objects, "transfer": "basic"})
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in body.splitlines()])
            self._answer(
                {"commitUrl": f"{hub.url}/org/name/commit/{'0' * 40}", "commitOid": "0" * 40}
            )
        else:
            self._answer({})

    def _commit(self, entries: list[dict[str, Any]]) -> None:
        hub = self.server
        for entry in entries:
            value = entry["value"]
            if entry["key"] == "file":
                hub.committed[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                hub.committed[value["path"]] = hub.objects[value["oid"]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def push_command(hub: Hub, model: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *retry_command(model, "hf://org/name").split()[1:]],
        env={
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "secret",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_command_uploads_to_the_hub(model: Path, hub: Hub) -> None:
    done = push_command(hub, model)
    assert done.returncode == 0, done.stderr
    assert hub.committed == content_of(model)
    assert hub.tokens == {"Bearer secret"}
    (created,) = hub.created
    assert (created["name"], created["organization"]) == ("name", "org")
    assert created.get("private") is True or created.get("visibility") == "private"


def test_the_command_reports_a_refusal(model: Path, hub: Hub) -> None:
    hub.refuses = True
    done = push_command(hub, model)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "hf://org/name" in done.stderr
