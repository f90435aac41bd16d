"""`make deploy-check`: overlays against the schemas of Kubernetes, Dockerfile against hadolint.

Runs offline in an environment of its own (deploy/check-requirements.txt). It plants a fault for
each of its judges first and ends if one of them does not see it.
"""

import copy
import logging
import subprocess
import sys
from pathlib import Path

import jsonschema  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
import kubernetes_validate  # pyright: ignore[reportMissingImports]

from tests.deploy.manifests import DEPLOY, OVERLAYS, Doc, render
from tests.deploy.schemas import SCHEMAS

# From the first with InferencePool v1 on GKE to the newest that the package knows.
VERSIONS = ("1.34", "1.35", "1.36", "1.37")
HADOLINT = Path(sys.executable).parent / "hadolint"


def faults(doc: Doc) -> list[str]:
    """What is wrong with one document; fields that the schema does not know are wrong."""
    schema = SCHEMAS.get((doc["apiVersion"], doc["kind"]))
    if schema is not None:
        errors = jsonschema.Draft202012Validator(schema).iter_errors(doc)
        return [f"{error.json_path}: {error.message}" for error in errors]
    found = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(doc, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            found.append(f"Kubernetes {version}: {path}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError:
            found.append(f"Kubernetes {version}: no schema, and none in tests/deploy/schemas.py")
    return found


def lint(dockerfile: str) -> str:
    """What hadolint says of a Dockerfile's text; "" is nothing."""
    done = subprocess.run(
        [str(HADOLINT), "--no-color", "-"],
        input=dockerfile,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def self_test(docs: tuple[Doc, ...]) -> None:
    """Sees that every judge finds a planted fault.

    Raises:
        AssertionError: one does not.
    """
    for doc in docs:
        mutant = copy.deepcopy(doc)
        mutant["spek"] = {}
        assert faults(mutant), f"an unknown field of {doc['kind']} is not seen"
        if "spec" in doc:
            mutant = copy.deepcopy(doc)
            mutant["spec"] = ["no list"]
            assert faults(mutant), f"a list as the spec of {doc['kind']} is not seen"
    unknown = {"apiVersion": "example.com/v1", "kind": "Unknown", "metadata": {"name": "x"}}
    assert faults(unknown), "a kind without a schema is not seen"
    assert lint("FROM python:latest\nRUN sudo ls\n"), "a bad Dockerfile is not seen"


def main() -> int:
    """Prints what was checked against what; exit code 1 if anything is wrong."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    self_test(render(OVERLAYS[0], "gcsfuse"))
    wrong = []
    checked: dict[tuple[str, str], int] = {}
    for overlay in OVERLAYS:
        for components in ((), ("gcsfuse",), ("privileged",)):
            for doc in render(overlay, *components):
                kind = (doc["apiVersion"], doc["kind"])
                checked[kind] = checked.get(kind, 0) + 1
                name = f"{'+'.join((overlay, *components))} {doc['kind']}/{doc['metadata']['name']}"
                wrong += [f"{name}: {text}" for text in faults(doc)]
    for (api_version, kind), count in sorted(checked.items()):
        judge = f"Kubernetes {', '.join(VERSIONS)}"
        if (api_version, kind) in SCHEMAS:
            judge = "no schema in a package: fields by tests/deploy/schemas.py"
        print(f"{count:3} {api_version} {kind}: {judge}")
    if said := lint((DEPLOY / "Dockerfile").read_text()):
        wrong.append(f"Dockerfile: {said}")
    print("  1 Dockerfile: hadolint")
    print("\n".join(wrong) or "no faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
