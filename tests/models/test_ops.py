"""What the families share, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_vl.models import ops


def test_cosines_and_sines_of_large_angles() -> None:
    rng = np.random.default_rng(0)
    small, large = rng.uniform(-10, 10, 20_000), rng.uniform(0, 2**20, 200_000)
    angles = np.concatenate([small, large, np.arange(64) * np.pi / 4]).astype(np.float32)
    cos, sin = jax.jit(ops.cosines_and_sines)(angles)
    np.testing.assert_allclose(cos, np.cos(angles.astype(np.float64)), rtol=0, atol=2**-23)
    np.testing.assert_allclose(sin, np.sin(angles.astype(np.float64)), rtol=0, atol=2**-23)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_a_product_of_the_factors_of_a_norm_is_that_of_the_norm(dtype: str, limit: float) -> None:
    rng = np.random.default_rng(1)
    x_TD, weight_D = rng.normal(size=(5, 48)) * 3, rng.uniform(0.5, 1.5, size=48)
    matrix_DF = rng.normal(size=(48, 7)) / 7
    x, weight, matrix = (jnp.asarray(a, dtype) for a in (x_TD, weight_D, matrix_DF))
    with ops.matmul_precision(dtype):
        y_TD, scale_T = ops.norm_factors(x, weight, 1e-2)
        found_TF = ops.scaled_einsum("td,df->tf", y_TD, matrix, scale_T)
    x64, weight64, matrix64 = (np.asarray(a, np.float64) for a in (x, weight, matrix))
    normed = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + 1e-2) * weight64
    assert found_TF.dtype == dtype
    expected = normed @ matrix64
    np.testing.assert_allclose(
        np.asarray(found_TF, np.float64), expected, rtol=limit, atol=limit * np.abs(expected).max()
    )
