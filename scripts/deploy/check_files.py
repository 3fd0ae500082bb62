"""Check files for Kubernetes, such as a filled-in copy of deploy/kubernetes/rayjob.yaml.

    python scripts/deploy/check_files.py my-job.yaml runs.yaml --crds crds/

The files may start any recipe. The checks are those of rlsys (the rules below), of Kubernetes (the
package kubernetes-validate) and of KubeRay (the package jsonschema, and KubeRay's CRDs in the
directory --crds or RLSYS_KUBERAY_CRDS). docs/deploy.md has the commands that get all of them. A
check whose package or CRD is missing is skipped, and the last lines name it.

Exit code 0: nothing was found. 1: something was found; each finding is a line.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rlsys.common.number_text import counted

ROOT = Path(__file__).resolve().parents[2]
CRDS_VARIABLE = "RLSYS_KUBERAY_CRDS"
CLUSTERS = {"RayJob": "rayjobs", "RayCluster": "rayclusters"}
END_S = 60  # for Ray and the run to end after the preStop hook


@dataclass
class Checker:
    """Findings about files, and the checks that were skipped.

    Attributes:
        crds: Directory with KubeRay's CRDs; None skips the comparison with KubeRay's fields.
    """

    crds: Path | None = None
    findings: list[str] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)

    def check_file(self, path: Path) -> None:
        """Check each document of a file."""
        try:
            documents = [one for one in yaml.safe_load_all(path.read_text()) if one is not None]
        except (OSError, ValueError, yaml.YAMLError) as error:
            self.findings.append(f"{path}: cannot be read as YAML: {error}")
            return
        found = [one for document in documents for one in self._document_findings(document)]
        self.findings += [f"{path}: {one}" for one in (found if documents else ["is empty"])]

    def _document_findings(self, document: Any) -> Iterator[str]:
        if not isinstance(document, dict) or "kind" not in document:
            yield "a document has no kind"
        elif document["kind"] in CLUSTERS:
            yield from self._cluster_findings(document)
        else:
            yield from self._kubernetes_findings(document, "")

    def _cluster_findings(self, document: dict[str, Any]) -> Iterator[str]:
        yield from self._kuberay_findings(document)
        try:
            for place, pod in pod_specs(document):
                manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
                yield from self._kubernetes_findings({**manifest, "spec": pod}, f"{place}: ")
            yield from rule_findings(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            yield f"lacks a part of deploy/kubernetes/, or has another form: {error!r}"

    def _kuberay_findings(self, document: dict[str, Any]) -> Iterator[str]:
        try:
            import jsonschema
        except ImportError:
            self.skipped.add("KubeRay's fields: pip install jsonschema")
            return
        file = self.crds and self.crds / f"ray.io_{CLUSTERS[document['kind']]}.yaml"
        if file is None or not file.is_file():
            missing = file or f"--crds DIR or {CRDS_VARIABLE}=DIR"
            self.skipped.add(f"KubeRay's fields: give its CRDs ({missing}, docs/deploy.md)")
            return
        validator = jsonschema.Draft202012Validator(spec_schema(file))
        for error in validator.iter_errors(document.get("spec")):
            yield f"KubeRay: {'.'.join(map(str, ['spec', *error.absolute_path]))}: {error.message}"

    def _kubernetes_findings(self, document: dict[str, Any], place: str) -> Iterator[str]:
        try:
            import kubernetes_validate as kubernetes
        except ImportError:
            self.skipped.add("Kubernetes' fields: pip install kubernetes-validate")
            return
        try:
            kubernetes.validate(document, kubernetes.latest_version(), strict=True)
        except kubernetes.ValidationError as error:
            path = ".".join(map(str, error.path))
            yield f"Kubernetes: {place}{path + ': ' if path else ''}{error.message}"
        except kubernetes.SchemaNotFoundError:
            self.skipped.add(
                f"the kind {document['kind']!r}, which Kubernetes itself does not have"
            )


@cache
def spec_schema(file: Path) -> Any:
    """Return the schema of `spec` in a CRD, which refuses unknown fields.

    `kubectl apply --validate=strict` refuses them too.
    """
    crd = yaml.safe_load(file.read_text())
    (version,) = (one for one in crd["spec"]["versions"] if one["name"] == "v1")
    return _strict(version["schema"]["openAPIV3Schema"]["properties"]["spec"])


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    known = {key: _strict(value) for key, value in schema.items()}
    if "properties" in known and not known.get("x-kubernetes-preserve-unknown-fields"):
        known.setdefault("additionalProperties", False)
    return known


def cluster_spec(document: dict[str, Any]) -> dict[str, Any]:
    """Return the cluster of a RayJob or RayCluster."""
    spec: dict[str, Any] = document["spec"]
    return spec.get("rayClusterSpec", spec)  # type: ignore[no-any-return]


def pod_specs(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the specification of each kind of pod."""
    cluster = cluster_spec(document)
    yield "headGroupSpec", cluster["headGroupSpec"]["template"]["spec"]
    for group in cluster.get("workerGroupSpecs", ()):
        yield f"workers {group['groupName']!r}", group["template"]["spec"]


def option_values(command: str) -> dict[str, str]:
    """Return the values of options in a command, by name without dashes. The last one counts.

    An option without a value has "".
    """
    values: dict[str, str] = {}
    words = shlex.split(command)
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, is_given, value = word.removeprefix("--").partition("=")
            if not is_given and not following.startswith("--"):
                value = following
            values[name.replace("_", "-")] = value
    return values


def hook_command(pod: dict[str, Any]) -> list[str]:
    """Return the words of the preStop hook of a pod's first container; may be empty."""
    command = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {})
    return [word for one in command.get("command", ()) for word in shlex.split(one)]


def rule_findings(document: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a RayJob or RayCluster for a run of rlsys, whatever its recipe."""
    cluster = cluster_spec(document)
    version = installed_ray()
    if cluster.get("rayVersion") != version:
        yield f"rayVersion={cluster.get('rayVersion')!r}: the image has Ray {version}"
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield "authOptions: without mode: token, anyone in the network can run programs"
    runs_dir = run = None
    if document["kind"] == "RayJob":
        options = option_values(document["spec"]["entrypoint"])
        runs_dir, run = options.get("runs-dir"), options.get("name")
        for name, value in (("resume", "auto"), ("cluster.address", "auto")):
            if options.get(name) != value:
                yield f"entrypoint: needs --{name} {value}"
        for name in ("name", "runs-dir"):
            if not options.get(name):
                yield f"entrypoint: needs --{name}, which the preStop hooks name too"
    for place, pod in pod_specs(document):
        for finding in _pod_findings(pod, runs_dir, run):
            yield f"{place}: {finding}"


def _pod_findings(pod: dict[str, Any], runs_dir: str | None, run: str | None) -> Iterator[str]:
    container = pod["containers"][0]
    paths = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
    volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
    memory = volumes.get(paths.get("/dev/shm"), {}).get("emptyDir") or {}
    if memory.get("medium") != "Memory":
        yield "needs a volume of memory at /dev/shm"
    if runs_dir and not any(_is_below(runs_dir, path) for path in paths):
        yield f"no volume is mounted at --runs-dir {runs_dir}"
    hook = hook_command(pod)
    if "checkpoint" not in hook:
        yield "the preStop hook does not run `python -m rlsys checkpoint`"
        return
    limit = option_values(shlex.join(hook)).get("timeout", "100")
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if float(limit) + END_S > grace:
        yield (
            f"terminationGracePeriodSeconds={grace}: must be at least {END_S} above the hook's "
            f"--timeout {limit}"
        )
    asked = hook[hook.index("checkpoint") + 1 :]
    if runs_dir and run and f"{runs_dir.rstrip('/')}/{run}" not in asked:
        yield f"the preStop hook does not name {runs_dir.rstrip('/')}/{run}, the entrypoint's run"


def _is_below(path: str, mount: str) -> bool:
    return Path(path).is_relative_to(mount) and mount != "/dev/shm"


def installed_ray() -> str:
    """Return the version of Ray that pyproject.toml pins."""
    (version,) = re.findall(r'"ray\[default\]==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return str(version)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check files and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    crds = os.environ.get(CRDS_VARIABLE)
    parser.add_argument("--crds", type=Path, default=crds and Path(crds), metavar="DIR")
    given = parser.parse_args(arguments)
    checker = Checker(crds=given.crds)
    for path in given.files:
        checker.check_file(path)
    for line in checker.findings:
        print(line)
    num_findings = len(checker.findings)
    print(f"{counted(len(given.files), 'file')}, {counted(num_findings, 'finding')}")
    for line in sorted(checker.skipped):
        print(f"skipped: {line}")
    return 1 if checker.findings else 0


if __name__ == "__main__":
    sys.exit(main())
