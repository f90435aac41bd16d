"""Precompile, serve and refuse, each in a process of its own: the executables travel on disk."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.media import image_part, text_part
from tpu_vl import cli
from tpu_vl.demo import MEDIA
from tpu_vl.precompile.executables import READY
from tpu_vl.spawn import running_server

SIZES = ["--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--max-frame-patches", "256"]
# jax's own line for each program that its compiler is given.
COMPILED = "Finished XLA compilation of"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the executables are."""
    return tmp_path_factory.mktemp("round-trip")


@pytest.fixture(scope="module")
def ready(folder: Path) -> dict[str, str]:
    """What `serve --precompile-only` printed, in a process that has ended."""
    command = [sys.executable, "-m", "tpu_vl.cli", "serve", "--precompile-only", *SIZES]
    done = subprocess.run(
        [*command, "--executables", str(folder)],
        env=os.environ | {"JAX_LOG_COMPILES": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ready = json.loads(done.stdout)
    assert done.stderr.count(COMPILED) >= ready["programs"] > 1
    assert f"{ready['programs']} programs go to {folder}" in done.stderr
    assert json.loads((folder / READY).read_text()) == ready
    return ready


def test_another_process_serves_without_compiling(
    folder: Path, ready: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    item = json.loads((MEDIA / "answers.json").read_text())[0]
    picture = image_part((MEDIA / item["file"]).read_bytes())
    body = {
        "messages": [{"role": "user", "content": [picture, text_part(item["question"])]}],
        "temperature": 0,
        "max_tokens": 16,
    }
    arguments = [*SIZES, "--executables", str(folder), "--require-executables"]
    arguments += ["--executables-digest", ready["digest"]]
    before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    log = tmp_path / "log"
    with log.open("w") as file, running_server(arguments, log=file) as base_url:
        answer = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"].strip() == item["answer"]
    text = log.read_text()
    assert f"{ready['programs']} programs ready, 0 of them compiled now" in text
    assert COMPILED not in text
    assert sorted((p.name, p.stat().st_mtime_ns) for p in folder.rglob("*")) == before


def refusal(folder: Path, *arguments: str) -> list[str]:
    """Runs `serve --require-executables`, which must refuse: the reverse is an endless server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpu_vl.launch.make_params", lambda *_: pytest.fail("weights were read"))
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger().addHandler(handler)
        try:
            command = ["serve", "--port", "0", "--require-executables"]
            code = cli.main([*command, "--executables", str(folder), *arguments])
        finally:
            logging.getLogger().removeHandler(handler)
    assert code == 2
    assert not [line for line in records if "listening" in line]
    return records


def test_other_flags_are_refused_by_the_field(folder: Path, ready: dict[str, str]) -> None:
    assert ready
    (*_, line) = refusal(folder, *SIZES, "--max-num-seqs", "3")
    assert "--require-executables" in line
    assert "engine.max_num_seqs (here 3, there 2)" in line
    assert "tpu-vl precompile" in line


def test_a_missing_program_is_refused(folder: Path, ready: dict[str, str]) -> None:
    program = folder / ready["key"] / "sample-2.exe"
    program.rename(program.with_suffix(".away"))
    (*_, line) = refusal(folder, *SIZES)
    program.with_suffix(".away").rename(program)
    assert "sample-2.exe is not there" in line


def test_a_wrong_digest_is_refused(folder: Path, ready: dict[str, str]) -> None:
    (*_, line) = refusal(folder, *SIZES, "--executables-digest", "0" * 64)
    assert f"has digest {ready['digest']}, not --executables-digest 000" in line


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (*_, line) = refusal(tmp_path, *SIZES)
    assert "there is no key in it at all" in line


def test_writing_and_requiring_exclude_each_other(tmp_path: Path) -> None:
    (*_, line) = refusal(tmp_path, "--precompile-only")
    assert "--precompile-only" in line
