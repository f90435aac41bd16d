"""Which options of the TPU compiler a program is compiled with."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tpu_vl.kernels.chips import CHIPS
from tpu_vl.mesh import make_mesh
from tpu_vl.precompile import compile as compiling
from tpu_vl.precompile import compiler_options
from tpu_vl.precompile.programs import Program

NAME = "xla_tpu_scoped_vmem_limit_kib"


def mesh_of(chip: str) -> Any:
    """What is read of a mesh of TPUs."""
    device = SimpleNamespace(platform="tpu", device_kind=CHIPS[chip].kind)
    return SimpleNamespace(devices=np.array([[device]]))


def test_windows_shrink_with_the_batch_up_to_the_defaults() -> None:
    mesh = mesh_of("v6e")
    assert [compiler_options.of_text(mesh, n) for n in (4, 256)] == [{NAME: "40960"}] * 2
    assert [compiler_options.of_text(mesh, n) for n in (257, 1024)] == [{NAME: "28672"}] * 2
    assert compiler_options.of_text(mesh, 2048) == {}


@pytest.mark.parametrize("chip", sorted(set(CHIPS) - {"v6e"}))
def test_chips_without_a_measurement_keep_the_defaults(chip: str) -> None:
    assert compiler_options.of_text(mesh_of(chip), 64) == {}


def test_other_platforms_get_no_option_of_tpus() -> None:
    assert compiler_options.of_text(make_mesh(1), 64) == {}


def test_the_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    lowered = SimpleNamespace(compile=lambda compiler_options: told.append(compiler_options))
    monkeypatch.setattr(compiling, "lower_program", lambda _: lowered)
    program = Program("text/64", max, (), None, (), make_mesh(1), {NAME: "1"})
    compiling.compile_program(program)
    assert told == [{NAME: "1"}]
