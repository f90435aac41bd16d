"""The image: a pinned base, every package pinned, and a user that is not root."""

import re
import tomllib
from pathlib import PurePosixPath

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.deploy.manifests import DEPLOY, ROOT, Manifests, render

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
# What pip would ask of the requirements inside the image.
TARGET = {
    **default_environment(),
    "python_version": "3.12",
    "python_full_version": "3.12.12",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of each, lines joined and comments left out."""
    lines = [x for x in DOCKERFILE.splitlines() if not x.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (head.upper(), rest.strip())
        for head, _, rest in (x.partition(" ") for x in joined.splitlines() if x.strip())
    ]


def stage(number: int) -> list[tuple[str, str]]:
    starts = [i for i, (head, _) in enumerate(instructions()) if head == "FROM"]
    return instructions()[starts[number] : [*starts, None][number + 1]]


def pins() -> dict[str, Version]:
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    pairs = [re.fullmatch(r"([\w.-]+)==([\w.+]+)", x) for x in lines if not x.startswith("#")]
    assert all(pairs), "every line pins one version"
    return {canonicalize_name(p[1]): Version(p[2]) for p in pairs if p}


def test_both_stages_are_of_the_one_pinned_base() -> None:
    (python,) = (rest for head, rest in instructions() if head == "ARG")
    assert re.fullmatch(r"PYTHON=python:3\.12\.\d+-slim-\w+", python)
    bases = [rest.split()[0] for head, rest in instructions() if head == "FROM"]
    assert bases == ["${PYTHON}", "${PYTHON}"]


def test_packages_come_from_the_pins_alone() -> None:
    installs = [rest for head, rest in instructions() if head == "RUN" and "pip install" in rest]
    assert len(installs) == 2
    assert all("--no-deps" in text for text in installs)
    assert "--requirement deploy/constraints.txt" in installs[0]
    assert "--no-build-isolation" in installs[1]
    assert installs[1].endswith("pip check")


def test_the_image_runs_as_the_manifests_user() -> None:
    context = Manifests(render("v6e-2x2")).server.pod["securityContext"]
    user = f"{context['runAsUser']}:{context['runAsGroup']}"
    heads = [head for head, _ in stage(1)]
    assert [rest for head, rest in stage(1) if head == "USER"] == [user]
    assert heads.index("USER") > max(i for i, h in enumerate(heads) if h in ("RUN", "COPY"))
    assert ("ENTRYPOINT", '["tpu-vl"]') in stage(1)


def test_no_secret_goes_into_a_layer() -> None:
    names = [rest for head, rest in instructions() if head in ("ARG", "ENV")]
    assert not re.search(r"TOKEN|SECRET|PASSWORD|KEY", " ".join(names))
    assert not re.search(r"\bCOPY\s+\.\s", DOCKERFILE)


def test_the_build_context_holds_what_is_copied_and_no_more() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert ignored[ignored.index("*") - 1].startswith("#")
    copied = {path for head, rest in stage(0) if head == "COPY" for path in rest.split()[:-1]}
    assert copied == allowed
    assert all((ROOT / PurePosixPath(path)).exists() for path in copied)


@pytest.mark.parametrize("extra", ["", "tpu"])
def test_pins_satisfy_what_the_package_asks_for(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["build-system"]["requires"] + (
        project["project"]["optional-dependencies"][extra]
        if extra
        else project["project"]["dependencies"]
    )
    found = pins()
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate(TARGET):
            assert found[canonicalize_name(requirement.name)] in requirement.specifier


def test_jax_its_library_and_the_tpu_compiler_are_pinned_together() -> None:
    found = pins()
    assert found["jax"] == found["jaxlib"]
    assert "libtpu" in found
    assert not {"torch", "jax-cuda13-plugin", "pytest"} & found.keys()
