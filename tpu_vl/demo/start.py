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
# Channels for what differs between the two frames of a pair. Pictures have nothing there and most
# clips little, so that the principal components of whole patches leave it out.
_CHANGE_COMPONENTS = 32
_COLOURS = 3


def initial_params(
    cfg: qwen3_vl.Qwen3VLConfig, backend: Backend, seed: int, batches: list[Batch]
) -> Any:
    """Random float32 parameters, with a patch embedding that whitens the patches of `batches`.

    A random embedding shows the tower little but the mean colour of a patch; principal components
    show edges and movement from the first step, and training needs several times fewer steps.
    Movement has the last channels for itself.
    """
    params = random(cfg, backend, seed)
    patches_XW = np.concatenate(
        [
            patches_PW[:num_patches]
            for batch in batches
            for patches_PW, num_patches in zip(batch.patches_GPW, batch.num_patches_G, strict=True)
        ]
    )
    patch_WD, patch_bias_D = _embedding(patches_XW, params.vision.patch_WD.shape[1])
    vision = replace(
        params.vision, patch_WD=jnp.asarray(patch_WD), patch_bias_D=jnp.asarray(patch_bias_D)
    )
    return replace(params, vision=vision)


def random(cfg: qwen3_vl.Qwen3VLConfig, backend: Backend, seed: int) -> Any:
    """Random float32 parameters."""
    return random_params(qwen3_vl.FAMILY, cfg, backend.mesh, "float32", seed)


def _embedding(patches_XW: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and bias [W, width], [width] for uint8 patches of [colour, frame, row, column]."""
    pixels = (patches_XW.astype(np.float32) / 127.5 - 1).reshape(len(patches_XW), _COLOURS, 2, -1)
    first_XV, second_XV = (pixels[:, :, frame].reshape(len(pixels), -1) for frame in range(2))
    mean_XV, change_XV = (first_XV + second_XV) / 2, (second_XV - first_XV) / 2
    mean_VD, mean_D = _whitening(mean_XV, width - _CHANGE_COMPONENTS)
    change_VD, _ = _whitening(change_XV[change_XV.any(axis=1)], _CHANGE_COMPONENTS)
    both_WD = np.concatenate([_spread(mean_VD, (1, 1)), _spread(change_VD, (-1, 1))], axis=1)
    # Where nothing moves, the channels of movement hold zero.
    return both_WD, np.concatenate([mean_D, np.zeros(_CHANGE_COMPONENTS, np.float32)])


def _spread(weights_VD: np.ndarray, signs: tuple[int, int]) -> np.ndarray:
    """Weights of half the sum, or the difference, of two frames as those of both frames."""
    parts = [sign / 2 * weights_VD.reshape(_COLOURS, -1, weights_VD.shape[1]) for sign in signs]
    return np.stack(parts, axis=1).reshape(-1, weights_VD.shape[1])


def _whitening(pixels_XV: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Projection and bias [V, width], [width] on the principal components."""
    mean_V = pixels_XV.mean(axis=0)
    variances, vectors_VD = np.linalg.eigh(np.cov(pixels_XV, rowvar=False))
    top = np.argsort(variances)[::-1][:width]
    floor = variances[top[min(_FULL_COMPONENTS, width) - 1]]
    weights_VD = (vectors_VD[:, top] / np.sqrt(variances[top] + floor)).astype(np.float32)
    return weights_VD, -mean_V @ weights_VD
