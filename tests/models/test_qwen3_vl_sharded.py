"""Two devices over "model" give what one gives, from weights that each loaded in part."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.models.tiny import TOLERANCE, Prompt, Runner, hf_logits, medium
from tpu_vl.mesh import make_mesh
from tpu_vl.models import qwen3_vl
from tpu_vl.weights.load import load_params


@pytest.mark.parametrize("shared_tokens", [qwen3_vl.SHARED_TOKENS, 1], ids=["whole", "shared"])
def test_two_devices_equal_reference(
    runner: Runner,
    reference: Any,
    checkpoint: Path,
    shared_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short batches are whole between the layers, long ones shared by the devices."""
    monkeypatch.setattr(qwen3_vl, "SHARED_TOKENS", shared_tokens)
    jax.clear_caches()  # what was traced under the other value
    mesh = make_mesh(2)
    params = load_params(checkpoint, qwen3_vl.FAMILY, runner.cfg, mesh, "float32")
    q_DNH = params.text.layers[0].q_DNH
    assert q_DNH.sharding.shard_shape(q_DNH.shape) == (40, 3, 14)
    sharded = Runner(params, runner.cfg, mesh)
    prompt = (
        Prompt()
        .text(4)
        .add(medium("image", 1, 4, 6, seed=21))
        .text(2)
        .add(medium("video", 2, 2, 4, seed=22))
        .text(5)
    )
    got = sharded.logits(prompt)
    np.testing.assert_allclose(got, hf_logits(reference, prompt), rtol=0, atol=TOLERANCE)
