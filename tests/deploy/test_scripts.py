"""The shell scripts inside the manifests, run as they are."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from tests.deploy.manifests import Doc, Manifests, render
from tpu_vl.precompile.executables import READY

HUB = "Qwen/Qwen3-VL-8B-Instruct"


def run(container: Doc, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        container["command"],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.fixture
def waiting(tmp_path: Path) -> tuple[Doc, dict[str, str]]:
    """The container that waits, on a store in a folder and with seconds for minutes."""
    m = Manifests(render("v6e-2x2"))
    container = m.server.container("wait-for-executables")
    environment = m.environment(container)
    assert environment["STORE"] == "/store"
    return container, environment | {"STORE": str(tmp_path), "WAIT_EVERY_S": "1"}


def test_the_wait_ends_with_the_marker(tmp_path: Path, waiting: tuple[Doc, dict[str, str]]) -> None:
    container, environment = waiting
    folder = tmp_path / "executables" / environment["RELEASE"]

    def precompile() -> None:
        folder.mkdir(parents=True)
        (folder / READY).touch()

    timer = threading.Timer(0.5, precompile)
    timer.start()
    done = run(container, environment)
    timer.join()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"waiting for {folder}/_READY (0 of at most 7500 s)"
    assert lines[-1].startswith(f"found {folder}/_READY after ")


def test_the_wait_has_a_limit_and_says_where_to_look(waiting: tuple[Doc, dict[str, str]]) -> None:
    container, environment = waiting
    done = run(container, environment | {"WAIT_LIMIT_S": "1"})
    assert done.returncode == 1
    assert "look at job/tpu-vl-precompile-r1" in done.stderr


@pytest.fixture
def fetching(tmp_path: Path) -> tuple[Doc, dict[str, str]]:
    """The container that fetches weights, with an `hf` that records what it is asked for."""
    m = Manifests(render("v6e-2x2"))
    container = m.job.container("weights")
    (tmp_path / "bin").mkdir()
    hf = tmp_path / "bin" / "hf"
    hf.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ ! -e {tmp_path}/fails ]\n')
    hf.chmod(0o755)
    environment = m.environment(container) | {
        "PATH": f"{hf.parent}:{os.environ['PATH']}",
        "TPU_VL_MODEL": str(tmp_path / "model"),
    }
    return container, environment


def test_weights_are_fetched_and_config_json_is_last(
    tmp_path: Path, fetching: tuple[Doc, dict[str, str]]
) -> None:
    container, environment = fetching
    done = run(container, environment)
    assert done.returncode == 0, done.stderr
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first.startswith(f"download {HUB} --revision main --local-dir {tmp_path}/model ")
    assert "--include *.safetensors" in first
    assert first.endswith("--exclude config.json")
    assert second == f"download {HUB} config.json --revision main --local-dir {tmp_path}/model"


def test_a_download_that_fails_leaves_no_config_json(
    tmp_path: Path, fetching: tuple[Doc, dict[str, str]]
) -> None:
    container, environment = fetching
    (tmp_path / "fails").touch()
    assert run(container, environment).returncode != 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_weights_that_are_there_are_left_alone(
    tmp_path: Path, fetching: tuple[Doc, dict[str, str]]
) -> None:
    container, environment = fetching
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    done = run(container, environment)
    assert (done.returncode, (tmp_path / "calls").exists()) == (0, False)
