"""Programs of Qwen3-VL-8B's real widths, from config values alone, by the TPU compiler.

The default test takes three layers: every layer of a program has the same fusions.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import tpu_compile

pytestmark = pytest.mark.skipif(
    not tpu_compile.have_libtpu(), reason="libtpu, the TPU compiler, is not installed"
)

CONFIG = tpu_compile.ROOT / "tests" / "configs" / "qwen3_vl_8b.json"
SCRIPT = "import sys; from bench.compiled import main; main(sys.argv[1:])"
GIB = 1 << 30


def compile_programs(config: Path, *names: str, timeout_s: float) -> dict[str, dict[str, Any]]:
    """The rows of `bench.compiled` by program; all programs where none is named."""
    flags = ("--model", str(config), "-tp", "4", "--target", "v6e:2x2", "--json")
    chosen = ("--programs", *names) if names else ()
    out = tpu_compile.run_script(SCRIPT, *flags, *chosen, timeout_s=timeout_s)
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {row["name"]: row for row in rows}


@pytest.fixture
def three_layers(tmp_path: Path) -> Path:
    """The config with as many layers as DeepStack needs."""
    config = json.loads(CONFIG.read_text())
    config["text_config"]["num_hidden_layers"] = 3
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_text_programs_of_three_layers_have_slow_fusions_at_most_in_the_first(
    three_layers: Path,
) -> None:
    rows = compile_programs(three_layers, "text/64", "text/1024", timeout_s=900)
    assert rows["text/1024"]["flagged"] == []
    # So few layers leave nothing to hide the first weights behind; 36 layers do.
    for found in rows["text/64"]["flagged"]:
        assert found["count"] == 1, found
        assert re.search(r"/attention/td,d[nk]h->t[nk]h/", found["scope"]), found
    for row in rows.values():
        assert row["num_kernels"] == 3, "one attention kernel per layer"
        # The donated state (KV pages and pool) is updated in place, and everything fits 32 GB.
        assert row["alias_bytes"] > 0.9 * row["argument_bytes"] - 3 * GIB
        assert row["temporary_bytes"] < GIB
    # Weights of three layers take 334,000 cycles of bandwidth; a scan would copy them first.
    assert rows["text/64"]["cycles"] < 700_000
    assert rows["text/1024"]["cycles"] < 1.6 * rows["text/1024"]["roofline_cycles"]


@pytest.mark.slow
def test_every_program_compiles_for_v6e_and_its_code_fits_the_budget() -> None:
    rows = compile_programs(CONFIG, timeout_s=6000)
    assert 10 < len(rows) <= 40
    assert {"zeros", "encode/1024", "text/64", "text/1024", "sample/64"} <= rows.keys()
    assert sum(row["code_bytes"] for row in rows.values()) < GIB
    for name, row in rows.items():
        assert row["argument_bytes"] + row["temporary_bytes"] < 31.25 * GIB, name
        expected = 36 if name.startswith("text/") else 0
        if not name.startswith("encode/"):
            assert row["num_kernels"] == expected, name
    for name in ("text/64", "text/1024"):
        assert rows[name]["flagged"] == [], name
    assert all(found["reason"] for found in rows["sample/64"]["flagged"])
