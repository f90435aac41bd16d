"""Random params: the same tree as a checkpoint gives, from a seed, on any mesh."""

from typing import Any

import jax
import numpy as np

from tests.weights.small import small_config
from tpu_vl.mesh import make_mesh
from tpu_vl.models import qwen3_vl
from tpu_vl.weights.random import random_params


def draw(seed: int = 0, tensor_parallel_size: int = 1, dtype: str = "float32") -> Any:
    mesh = make_mesh(tensor_parallel_size)
    return random_params(qwen3_vl.FAMILY, small_config(), mesh, dtype, seed)


def test_tree_and_scales() -> None:
    params = draw(dtype="bfloat16")
    abstract = qwen3_vl.abstract_params(small_config(), "bfloat16")
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(abstract), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(params.text.layers[0].q_norm_H, 1)
    np.testing.assert_array_equal(params.vision.merger.norm_D, 1)
    np.testing.assert_array_equal(params.vision.layers.qkv_bias_Y3NH, 0)
    # fan-in of o is N * H, of qkv D
    layer = params.text.layers[0]
    fan_in = layer.o_NHD.shape[0] * layer.o_NHD.shape[1]
    assert abs(np.asarray(layer.o_NHD, np.float32).std() * fan_in**0.5 - 1) < 0.1
    width = params.vision.layers.qkv_YD3NH.shape[1]
    assert abs(np.asarray(params.vision.layers.qkv_YD3NH, np.float32).std() * width**0.5 - 1) < 0.1


def test_seed_decides_and_mesh_does_not() -> None:
    first, again, other = draw(1), draw(1, tensor_parallel_size=2), draw(2)
    assert again.text.layers[0].q_DNH.sharding.shard_shape((40, 6, 14)) == (40, 3, 14)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.any(np.asarray(first.text.embed_IE) != np.asarray(other.text.embed_IE))
    # Arrays of one shape differ from each other.
    layer = first.text.layers[0]
    assert np.any(np.asarray(layer.k_DKH) != np.asarray(layer.v_DKH))
