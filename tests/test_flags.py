"""The flags table: parsing, environment variables, the docs."""

import argparse
import dataclasses
from pathlib import Path

import pytest

from tpu_vl import flags
from tpu_vl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


def flags_of(*commands: str) -> list[type]:
    return [flags.COMMANDS[name][0] for name in commands]


def parse(*arguments: str, environ: dict[str, str] | None = None) -> flags.ServeFlags:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, flags.ServeFlags)
    parsed = parser.parse_args(flags.join_dotted(arguments))
    return flags.read_flags(flags.ServeFlags, parsed, environ or {})


def test_aliases_and_types() -> None:
    read = parse("-tp", "4", "--gpu-memory-utilization", "0.5", "--language-model-only")
    assert (read.tensor_parallel_size, read.hbm_utilization, read.text_model_only) == (4, 0.5, True)
    assert read.port == 8000


def test_environment_is_read_and_the_command_line_wins() -> None:
    environ = {"TPU_VL_PORT": "81", "TPU_VL_MAX_NUM_SEQS": "3", "TPU_VL_TEXT_MODEL_ONLY": "1"}
    read = parse("--port", "82", environ=environ)
    assert (read.port, read.max_num_seqs, read.text_model_only) == (82, 3, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("TPU_VL_PORT", "many"), ("TPU_VL_TEXT_MODEL_ONLY", "perhaps"), ("TPU_VL_DTYPE", "float16")],
)
def test_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        parse(environ={name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--max-num-seqs", "0"),
        ("--block-size", "-1"),
        ("--port", "-1"),
        ("-tp", "0"),
        ("--gpu-memory-utilization", "1.5"),
    ],
)
def test_numbers_out_of_bounds_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{value} must be at (least|most)"):
        parse(name, value)


def test_dotted_limits_become_json() -> None:
    read = parse("--limit-mm-per-prompt.image", "2", "--limit-mm-per-prompt.video=0")
    assert read.limit_mm_per_prompt == '{"image": 2, "video": 0}'


def test_docs_hold_the_tables() -> None:
    assert (ROOT / "docs" / "flags.md").read_text() == flags.document(), "make docs writes it"


def test_precompile_takes_every_flag_of_serve_that_decides_a_size() -> None:
    names = [{f.name for f in dataclasses.fields(c)} for c in flags_of("serve", "precompile")]
    sizes = {f.name for f in dataclasses.fields(flags.SizeFlags)}
    assert names[0] & names[1] == sizes
