"""README's commands exist: make targets, `tpu-vl` command lines, files it links to."""

import re
import shlex
from pathlib import Path

import pytest

from tpu_vl.cli import make_parser

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.split("#")[0].strip() for line in joined.splitlines() if line.strip()]


def test_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 200


@pytest.mark.parametrize("line", [c for c in commands() if c.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line.split()[1] in targets


@pytest.mark.parametrize("line", [c for c in commands() if c.startswith("tpu-vl ")])
def test_command_lines_parse(line: str) -> None:
    assert make_parser().parse_args(shlex.split(line)[1:]).command == line.split()[1]


@pytest.mark.parametrize("line", [c for c in commands() if c.startswith("python ")])
def test_scripts_exist(line: str) -> None:
    assert (ROOT / line.split()[1]).is_file()


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", TEXT))
def test_links_lead_to_files(target: str) -> None:
    assert (ROOT / target).exists()


def test_commands_were_found() -> None:
    kinds = {line.split()[0] for line in commands()}
    assert {"make", "tpu-vl", "python", "pip"} <= kinds


def test_files_of_the_curl_example_exist() -> None:
    (name,) = re.findall(r"base64 < (\S+)", TEXT)
    # Linux takes at most 128 KiB in one argument of a command; base64 makes 4 bytes of 3.
    assert 0 < (ROOT / name).stat().st_size * 4 / 3 < 100 * 1024
