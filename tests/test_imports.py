"""Who may import whom: the rule of docs/architecture.md, read from the sources."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STDLIB: set[str] = set()
# Layer -> the project's layers that its files may import, and the third-party packages.
RULE: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), STDLIB),
    "types": (set(), STDLIB),
    "config": ({"errors"}, STDLIB),
    "flags": ({"errors"}, STDLIB),
    "tree": (set(), {"jax", "flax"}),
    "mesh": ({"errors"}, {"jax", "numpy"}),
    "kernels": ({"kernels", "errors", "mesh"}, {"jax", "numpy"}),
    "vision": ({"vision", "types", "errors", "config", "models"}, {"numpy", "PIL", "av"}),
    "chat": (
        {"chat", "types", "errors", "config"},
        {"numpy", "jinja2", "tokenizers", "transformers"},
    ),
    "models": ({"models", "kernels", "tree", "mesh", "errors"}, {"jax", "numpy"}),
    "weights": (
        {"weights", "models", "tree", "mesh", "errors"},
        {"jax", "numpy", "safetensors", "ml_dtypes"},
    ),
    "engine": (
        {
            "engine",
            "models",
            "kernels",
            "vision",
            "weights",
            "tree",
            "mesh",
            "types",
            "errors",
            "config",
        },
        {"jax", "numpy", "msgspec"},
    ),
    "precompile": (
        {
            "precompile",
            "engine",
            "models",
            "kernels",
            "vision",
            "tree",
            "mesh",
            "types",
            "errors",
            "config",
        },
        {"jax", "jaxlib", "numpy", "fsspec"},
    ),
    "server": (
        {
            "server",
            "chat",
            "vision",
            "types",
            "errors",
            "config",
            "engine.client",
            "engine.messages",
        },
        {
            "fastapi",
            "starlette",
            "uvicorn",
            "httpx",
            "httpcore",
            "anyio",
            "prometheus_client",
            "numpy",
            "pydantic",
            "msgspec",
        },
    ),
}


def layer_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if parts[0] in ("kernels", "precompile") else Path(parts[1]).stem


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names.add(module)
            if module in ("tpu_vl", "tpu_vl.engine"):
                names.discard(module)
                names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def sources() -> list[Path]:
    files = [
        *(
            p
            for p in (ROOT / "tpu_vl").rglob("*.py")
            if not {"kernels", "precompile"} & set(p.parts)
        ),
        *(ROOT / "kernels").rglob("*.py"),
        *(ROOT / "precompile").rglob("*.py"),
    ]
    return sorted(p for p in files if layer_of(p) in RULE)


def violations(path: Path, names: set[str]) -> list[str]:
    import sys

    layers, packages = RULE[layer_of(path)]
    bad = []
    for name in sorted(names):
        top, _, rest = name.partition(".")
        if top == "tpu_vl":
            if not any(rest == a or rest.startswith(a + ".") for a in layers):
                bad.append(name)
        elif top not in sys.stdlib_module_names and top not in packages:
            bad.append(name)
    return bad


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_keep_the_rule(path: Path) -> None:
    assert violations(path, imported(path)) == []


def test_the_rule_can_fail() -> None:
    path = ROOT / "precompile" / "buckets.py"
    assert violations(path, {"tpu_vl.server.app", "torch", "json"}) == [
        "torch",
        "tpu_vl.server.app",
    ]


def test_files_stay_short() -> None:
    long = {
        p.relative_to(ROOT).as_posix(): n
        for folder in ("tpu_vl", "kernels", "precompile", "tests", "bench")
        for p in (ROOT / folder).rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 600
    }
    assert long == {}
