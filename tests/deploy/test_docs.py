"""docs/deploy.md names what is there: files, targets, commands, and the overlays' own values."""

import re
import shlex

import pytest

from tests.deploy.manifests import OVERLAYS, ROOT, Manifests, render
from tpu_vl.cli import make_parser
from tpu_vl.flags import join_dotted
from tpu_vl.precompile.targets import parse_target

TEXT = (ROOT / "docs" / "deploy.md").read_text()


def commands() -> list[str]:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", " ")
    return [line.strip() for line in blocks.splitlines() if line.strip()]


def test_files_and_targets_exist() -> None:
    paths = set(re.findall(r"\b(?:deploy|tests)/[\w./-]+\w", TEXT)) | {
        f"deploy/overlays/v6e-2x2/{path}" for path in re.findall(r"`(\.\./[\w./-]+)`", TEXT)
    }
    assert len(paths) > 5
    assert [p for p in sorted(paths) if not (ROOT / p).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)`", TEXT):
        assert f"\n{target}:" in makefile


def test_every_tpu_vl_command_parses() -> None:
    lines = [c for c in commands() if c.startswith("tpu-vl ")]
    assert lines
    for line in lines:
        make_parser().parse_args(join_dotted(shlex.split(line)[1:]))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_table_of_overlays_is_true(overlay: str) -> None:
    m = Manifests(render(overlay))
    settings = m.environment(m.server.container("server"))
    machine = parse_target(settings["TPU_VL_TARGET"]).machine.name
    model = settings["TPU_VL_SERVED_MODEL_NAME"]
    cells = [
        f"`{overlay}`",
        f"`{machine}`",
        str(m.server.num_chips),
        settings["TPU_VL_TENSOR_PARALLEL_SIZE"],
        model.partition("/")[2],
    ]
    assert f"| {' | '.join(cells)} |\n" in TEXT
    assert settings["WEIGHTS_REPO"] == model
    assert settings["TPU_VL_MODEL"] == f"/store/weights/{model.partition('/')[2]}"


def test_names_of_the_commands_are_those_of_the_manifests() -> None:
    m = Manifests(render("v6e-2x2"))
    text = "\n".join(commands())
    assert "slice=v6e-2x2" in text.lower()
    assert set(re.findall(r"--namespace (\S+)", text)) == {m.one("Namespace")["metadata"]["name"]}
    assert f"job/{m.job.doc['metadata']['name']}" in text
    secrets = {
        e["valueFrom"]["secretKeyRef"]["name"]: e["valueFrom"]["secretKeyRef"]["key"]
        for c in (*m.job.containers, *m.server.containers)
        for e in c.get("env", [])
        if "secretKeyRef" in e.get("valueFrom", {})
    }
    found = re.findall(r"create secret generic (\S+) --from-literal (\w+)=", text)
    assert dict(found) == secrets
