"""`tpu-vl precompile`: a model's JSON files alone, on a machine without its devices."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests import tpu_compile
from tpu_vl import cli, demo
from tpu_vl.checkpoint import open_checkpoint
from tpu_vl.precompile import compile
from tpu_vl.precompile.executables import READY, Store
from tpu_vl.precompile.folder import open_folder

ROOT = Path(__file__).resolve().parents[2]
needs_libtpu = pytest.mark.skipif(not tpu_compile.have_libtpu(), reason="libtpu is not installed")


def config_folder(folder: Path) -> Path:
    """The bundled model with one layer: config.json and nothing else."""
    config = json.loads((demo.CHECKPOINT / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 1
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def precompile(model: Path, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Runs the command without a TPU and without a hint that there is none."""
    unset = ("JAX_PLATFORMS", "XLA_FLAGS", "TPU_SKIP_MDS_QUERY")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tpu_vl.cli", "precompile", "--model", str(model)),
            *("--target", "v6e:2x2", "-tp", "2", "--out", str(out), *arguments),
        ],
        env={k: v for k, v in os.environ.items() if k not in unset},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@needs_libtpu
def test_a_config_alone_gives_every_program(tmp_path: Path) -> None:
    model, out = config_folder(tmp_path / "model"), tmp_path / "out"
    sizes = ["--text-model-only", "--max-num-seqs", "4", "--max-num-batched-tokens", "4"]
    ready, log = precompile(model, out, *sizes)
    assert "compiling for v6e:2x2, 1 host of type ct6e-standard-4t" in log
    assert "3 programs go to" in log
    assert "3 programs ready, 3 of them compiled now" in log
    assert json.loads((out / READY).read_text()) == ready
    fields = json.loads((out / ready["key"] / "key.json").read_text())
    assert fields["device_kind"] == "TPU v6 lite"
    assert fields["topology.host_bounds"] == "2x2x1"
    assert fields["engine.max_num_seqs"] == 4
    store = Store(open_folder(str(out)), fields, digest=ready["digest"])
    assert store.key == ready["key"]
    store.open()
    for name in ("zeros", "text/4", "sample/4"):
        assert store.has(name)

    (out / ready["key"] / "text-4.exe").write_bytes(b"damaged")
    again, log = precompile(model, out, *sizes)
    assert "3 programs ready, 1 of them compiled now" in log
    assert again["key"] == ready["key"]
    Store(open_folder(str(out)), fields, digest=again["digest"]).open()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--target says which TPUs"),
        (["--target", "v6e:7x7"], "there are v6e:1x1"),
        (["--target", "v6e:2x2", "-tp", "5"], r"--tensor-parallel-size 5 .* there are 4 \(tpu\)"),
        (["--target", "v6e:2x2", "--max-model-len", "99999"], "--max-model-len 99999"),
    ],
)
@needs_libtpu
def test_what_does_not_fit_is_one_line(
    arguments: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert cli.main(["precompile", *arguments]) == 2
    (record,) = caplog.messages
    assert re.search(message, record), record


def test_only_configs_are_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(model: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append([model, *allow_patterns])
        return str(demo.CHECKPOINT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    open_checkpoint("Some/Model", configs_only=True)
    assert asked == [["Some/Model", "*config.json"]]


def test_a_folder_that_cannot_be_written_is_found_out_before_compiling(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "compile_program", lambda _: pytest.fail("compiled"))
    (tmp_path / "file").write_text("")
    arguments = ["serve", "--precompile-only", "--executables", str(tmp_path / "file")]
    with caplog.at_level(logging.ERROR):
        assert cli.main(arguments) == 2
    assert "cannot be written" in caplog.text
