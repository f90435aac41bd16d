"""The tiny model of this folder: made in torch, saved, and loaded by the project's own loader."""

from pathlib import Path
from typing import Any

import pytest

from tpu_vl.mesh import make_mesh
from tpu_vl.models import qwen3_vl
from tpu_vl.weights.load import load_params


@pytest.fixture(scope="session")
def reference() -> Any:
    from tests.models import tiny

    return tiny.hf_model()


@pytest.fixture(scope="session")
def checkpoint(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def runner(reference: Any, checkpoint: Path) -> Any:
    from tests.models import tiny

    cfg = qwen3_vl.parse_config(reference.config.to_dict())
    mesh = make_mesh(1)
    params = load_params(checkpoint, qwen3_vl.FAMILY, cfg, mesh, "float32")
    return tiny.Runner(params, cfg, mesh)
