"""public_cases.toml: every case of a closed area is held by a test that exists, or says why not."""

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CASES = tomllib.loads((ROOT / "tests" / "public_cases.toml").read_text())
CLOSED_AREAS = {
    "image-decode": 14,
    "image-resize": 14,
    "video-decode": 10,
    "video-timing": 8,
    "media-order": 3,
    "placeholder": 5,
    "mrope": 8,
    "chunked-prefill": 5,
    "deepstack": 1,
    "vision-numerics": 6,
    "checkpoint": 5,
    "sharding": 3,
    "compile-startup": 4,
}


@cache
def names_of_tests(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, kinds))


def problem(case: dict[str, str]) -> str | None:
    if set(case) - {"area", "statement", "source", "test", "reason"}:
        return "unknown field"
    if not all(case.get(k) for k in ("area", "statement", "source")):
        return "area, statement and source must stand alone"
    if ("test" in case) == ("reason" in case):
        return "either a test or a reason"
    if "reason" in case:
        return None if len(case["reason"]) > 20 else "the reason says nothing"
    path, _, name = case["test"].partition("::")
    if not (ROOT / path).is_file():
        return f"no file {path}"
    return None if name.partition("[")[0] in names_of_tests(path) else f"no test {case['test']}"


@pytest.mark.parametrize("case_id", sorted(CASES))
def test_case_is_held(case_id: str) -> None:
    assert problem(CASES[case_id]) is None


@pytest.mark.parametrize(("area", "count"), CLOSED_AREAS.items())
def test_closed_areas_are_complete(area: str, count: int) -> None:
    assert sum(c["area"] == area for c in CASES.values()) == count


@pytest.mark.parametrize(
    "case",
    [
        {"area": "a", "statement": "s", "source": "x", "test": "tests/nowhere.py::test_x"},
        {"area": "a", "statement": "s", "source": "x", "test": "tests/test_flags.py::test_none"},
        {"area": "a", "statement": "s", "source": "x"},
        {"area": "a", "statement": "s", "source": "x", "reason": "no"},
        {"area": "a", "source": "x", "reason": "a long enough reason"},
    ],
)
def test_the_check_can_fail(case: dict[str, str]) -> None:
    assert problem(case) is not None
