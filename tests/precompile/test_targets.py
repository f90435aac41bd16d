"""Targets: which slices there are, on how many hosts, and that they need no TPU."""

import json
import sys
from typing import Any

import pytest

from tests import tpu_compile
from tpu_vl.errors import ConfigError
from tpu_vl.kernels.chips import CHIPS
from tpu_vl.precompile import targets
from tpu_vl.precompile.targets import MACHINES, parse_target


@pytest.mark.parametrize(
    ("text", "machine", "num_hosts"),
    [
        ("v6e:1x1", "ct6e-standard-1t", 1),
        ("v6e:2x2", "ct6e-standard-4t", 1),
        ("v6e:2x4", "ct6e-standard-8t", 1),
        ("v6e:4x4", "ct6e-standard-4t", 4),
        ("ct6e-standard-4t:2x4", "ct6e-standard-4t", 2),
        ("ct6e-standard-8t:2x4", "ct6e-standard-8t", 1),
        ("v5e:2x4", "ct5lp-hightpu-8t", 1),
        ("v5p:2x2x2", "ct5p-hightpu-4t", 2),
        ("tpu7x:1x1x1", "tpu7x-standard-1t", 1),
        ("tpu7x-standard-4t:2x2x4", "tpu7x-standard-4t", 4),
    ],
)
def test_a_target_is_a_chip_or_a_machine_and_a_topology(
    text: str, machine: str, num_hosts: int
) -> None:
    target = parse_target(text)
    assert (target.machine.name, target.num_hosts) == (machine, num_hosts)
    assert str(target).startswith(f"{target.machine.chip}:{target.topology}, {num_hosts} host")


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("v6e", "v6e:1x1, v6e:2x2, v6e:2x4"),
        ("v6e:3x3", "v6e:1x1, v6e:2x2, v6e:2x4"),
        ("ct6e-standard-8t:4x4", "there are ct6e-standard-8t:2x4$"),
        ("v9:2x2", "v5e, v5p, v6e, tpu7x"),
        ("a3-highgpu-8g:1x1", "ct5lp-hightpu-1t, .*tpu7x-standard-4t"),
    ],
)
def test_what_is_unknown_is_told_what_there_is(text: str, listed: str) -> None:
    with pytest.raises(ConfigError, match=listed) as error:
        parse_target(text)
    assert f"--target {text}" in str(error.value)


def test_every_chip_that_can_be_compiled_for_has_its_facts() -> None:
    assert {m.chip for m in MACHINES} == set(CHIPS)


def test_without_the_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda _: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'jax\[tpu\]'"):
        targets.describe_devices(parse_target("v6e:2x2"))


SCRIPT = """
import json, os, sys
from tpu_vl.precompile import key, targets

found = {}
for text in sys.argv[1:]:
    target = targets.parse_target(text)
    devices = targets.describe_devices(target)
    found[text] = {
        "kind": devices[0].device_kind,
        "topology": key.topology(devices),
        "num_hosts": target.num_hosts,
        "num_chips": target.num_chips,
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def described() -> dict[str, dict[str, Any]]:
    """Every slice of up to 64 chips, as libtpu describes it."""
    texts = [f"{m.name}:{t}" for m in MACHINES for t in m.topologies]
    small = [t for t in texts if parse_target(t).num_chips <= 64]
    return json.loads(tpu_compile.run_script(SCRIPT, *small))


@pytest.mark.skipif(not tpu_compile.have_libtpu(), reason="libtpu is not installed")
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_libtpu_knows_every_slice_as_the_table_does(
    described: dict[str, dict[str, Any]], machine: targets.Machine
) -> None:
    slices = {t: v for t, v in described.items() if t.startswith(machine.name + ":")}
    assert slices
    for found in slices.values():
        chip = CHIPS[machine.chip]
        assert found["kind"] == chip.kind
        shape = found["topology"]
        assert shape["num_hosts"] == found["num_hosts"]
        assert shape["host_bounds"] == "x".join(str(n) for n in machine.host_bounds)
        devices_per_chip = 2 if machine.chip == "tpu7x" else 1
        assert shape["num_devices"] == found["num_chips"] * devices_per_chip
