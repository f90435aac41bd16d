"""The programs of each family under several limits, against a snapshot.

A changed default, ladder or program shows here. `python -m tests.precompile.test_program_list`
writes the snapshots anew; read the difference before you keep it.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.precompile.named import model_on
from tpu_vl.sized import SizedModel, list_programs

SNAPSHOTS = Path(__file__).parent / "snapshots"
EIGHT_B = ("qwen3_vl_8b", "v6e:2x2", 4)
CASES: dict[str, tuple[tuple[str, str, int], dict[str, Any]]] = {
    "2B, one device": (("qwen3_vl_2b", "v6e:2x2", 1), {}),
    "8B, defaults": (EIGHT_B, {}),
    "8B, tower in data mode": (EIGHT_B, {"mm_encoder_tp_mode": "data"}),
    "8B, pictures only": (EIGHT_B, {"limit_mm_per_prompt": '{"video": 0}'}),
    "8B, pictures of 256 tokens only": (
        EIGHT_B,
        {"limit_mm_per_prompt": '{"video": 0}', "image_max_tokens": 256},
    ),
    "8B, videos only": (EIGHT_B, {"limit_mm_per_prompt": '{"image": 0}'}),
    "8B, text only": (EIGHT_B, {"text_model_only": True}),
    "8B, 16 sequences": (EIGHT_B, {"max_num_seqs": 16, "max_num_batched_tokens": 1024}),
}


@cache
def model(case: str) -> SizedModel:
    (name, target, size), flags = CASES[case]
    return model_on(name, target, tensor_parallel_size=size, **flags)


@cache
def listed(case: str) -> tuple[str, ...]:
    """The programs' names; of a tower program also the parts of its last block."""
    e = model(case).engine_config
    names = []
    for program in list_programs(model(case)):
        kind, _, size = program.name.partition("/")
        blocks = ""
        if kind == "encode":
            blocks = f" in blocks of {e.row_block}, the last of {e.steps_of(int(size))} sizes"
        names.append(program.name + blocks)
    return tuple(names)


def snapshot() -> dict[str, str]:
    """File name -> text, one file per family."""
    parts: dict[str, list[str]] = {}
    for case in CASES:
        lines = [f"# {case}: {len(listed(case))} programs", *listed(case), ""]
        parts.setdefault(model(case).family.name, []).extend(lines)
    return {f"{name}.txt": "\n".join(lines) for name, lines in parts.items()}


def test_the_list_is_the_snapshot() -> None:
    kept = {p.name: p.read_text() for p in SNAPSHOTS.glob("*.txt")}
    assert snapshot() == kept, "python -m tests.precompile.test_program_list, and read the change"


def encode_sizes(case: str) -> list[int]:
    return [int(m[1]) for n in listed(case) if (m := re.match(r"encode/(\d+) ", n))]


@pytest.mark.parametrize("case", CASES)
def test_no_server_has_more_than_forty_programs(case: str) -> None:
    assert len(set(listed(case))) == len(listed(case)) <= 40


def test_a_service_lists_what_it_can_meet_and_no_more() -> None:
    everything = encode_sizes("8B, defaults")
    assert len(encode_sizes("8B, pictures of 256 tokens only")) == 1
    assert model("8B, pictures of 256 tokens only").max_frame_patches == 1_024
    assert encode_sizes("8B, videos only")[-1] == 49_152 < everything[-1]
    assert encode_sizes("8B, text only") == []
    text = [n for n in listed("8B, defaults") if not n.startswith("encode")]
    assert list(listed("8B, text only")) == text


if __name__ == "__main__":
    for file_name, content in snapshot().items():
        (SNAPSHOTS / file_name).write_text(content)
