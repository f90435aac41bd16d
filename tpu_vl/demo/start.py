"""The bundled model's parameters before the first step."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_vl.demo.batches import Batch
from tpu_vl.models import qwen3_vl
from tpu_vl.models.family import Backend
from tpu_vl.weights.random import random_params

# Principal components beyond this many are not scaled up to unit variance: they hold noise.
_FULL_COMPONENTS = 32


def initial_params(
    cfg: qwen3_vl.Qwen3VLConfig, backend: Backend, seed: int, batches: list[Batch]
) -> Any:
    """Random float32 parameters, with a patch embedding that whitens the patches of `batches`.

    A random embedding shows the tower little but the mean colour of a patch; principal components
    show edges and movement from the first step, and training needs several times fewer steps.
    """
    params = random(cfg, backend, seed)
    patches_XW = np.concatenate(
        [
            patches_PW[:num_patches]
            for batch in batches
            for patches_PW, num_patches in zip(batch.patches_GPW, batch.num_patches_G, strict=True)
        ]
    )
    patch_WD, patch_bias_D = _whitening(patches_XW, params.vision.patch_WD.shape[1])
    vision = replace(
        params.vision, patch_WD=jnp.asarray(patch_WD), patch_bias_D=jnp.asarray(patch_bias_D)
    )
    return replace(params, vision=vision)


def random(cfg: qwen3_vl.Qwen3VLConfig, backend: Backend, seed: int) -> Any:
    """Random float32 parameters."""
    return random_params(qwen3_vl.FAMILY, cfg, backend.mesh, "float32", seed)


def _whitening(patches_XW: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Projection and bias [W, width], [width] of uint8 patches on their principal components."""
    pixels_XW = patches_XW.astype(np.float32) / 127.5 - 1
    mean_W = pixels_XW.mean(axis=0)
    covariance_WW = np.cov(pixels_XW, rowvar=False)
    variances, vectors_WD = np.linalg.eigh(covariance_WW)
    top = np.argsort(variances)[::-1][:width]
    floor = variances[top[min(_FULL_COMPONENTS, width) - 1]]
    patch_WD = (vectors_WD[:, top] / np.sqrt(variances[top] + floor)).astype(np.float32)
    return patch_WD, -mean_W @ patch_WD
