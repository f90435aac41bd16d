"""What `bench` says about how often the shipped kernels' blocks run is what they run."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged_kernel

from bench import matmuls, rivals, visits

RNG = np.random.default_rng(0)


def tower(num_heads: int, num_rows: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal((3, num_heads, num_rows, 128)), jnp.float32)


def counted(run) -> dict[str, int]:
    def traced():
        with rivals.named_blocks(), pltpu.force_tpu_interpret_mode():
            return run()

    return dict(visits.count(traced))


def keep(counts: dict[str, int], names: dict[str, int]) -> dict[str, int]:
    return {name: counts.get(name, 0) for name in names}


def test_splash_counts() -> None:
    x, segment_P = tower(2, 512), jnp.zeros(512, jnp.int32)
    found = counted(
        lambda: rivals.splash(
            x[0], x[1], x[2], segment_P, block_q=128, block_kv=256, block_kv_compute=128
        )
    )
    expected = rivals.splash_counts(2, 512, 128, 256)
    assert keep(found, expected) == expected
    assert expected["run"] == 2 * 4 * 2


def test_flash_counts() -> None:
    x, segment_P = tower(2, 512), jnp.zeros(512, jnp.int32)
    found = counted(
        lambda: rivals.flash(
            x[0], x[1], x[2], segment_P, block_q=128, block_k_major=256, block_k=128, scale=1.0
        )
    )
    expected = rivals.flash_counts(2, 512, 128, 256)
    assert keep(found, expected) == expected


def test_matmuls_counts_and_result() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in tower(2, 512))
    blocks = {"block_q": 128, "block_kv": 128, "heads": 2, "unroll": 2}
    exact = np.einsum(
        "npq,nqh->nph", np.einsum("nph,nqh->npq", *map(np.float32, (q, k))), np.float32(v)
    )
    for form in matmuls.FORMS:
        results = []

        def run(form: str = form, results: list = results) -> jax.Array:
            results.append(matmuls.matmuls(q, k, v, width=128, form=form, **blocks, interpret=True))
            return results[0]

        found = visits.count(run)
        assert keep(found, {"kernel": 0, "blocks": 0}) == matmuls.matmuls_counts(2, 512, **blocks)
        got = np.float32(results[0])
        got = np.swapaxes(got, 1, 2) if form == "turned" else got
        np.testing.assert_allclose(got, exact, rtol=0.05, atol=0.05 * np.abs(exact).max())


def test_ragged_counts() -> None:
    q_lens, kv_lens = (1, 40, 3), (200, 70, 130)
    num_tokens, page_size, max_pages = 64, 16, 16
    num_pages = 48
    pages = jnp.zeros((num_pages, page_size, 2, 128), jnp.float32)
    table = jnp.asarray(RNG.permutation(num_pages).reshape(3, max_pages), jnp.int32)
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32)
    copy = ragged_kernel.MultiPageAsyncCopyDescriptor
    wait = copy.wait

    def store(ref, value, *, mask) -> None:
        ref[...] = jnp.where(mask, value, ref[...])

    def run() -> jax.Array:
        return rivals.ragged(
            jnp.zeros((num_tokens, 2, 128), jnp.float32),
            pages,
            jnp.asarray(kv_lens, jnp.int32),
            table,
            starts,
            jnp.asarray([3], jnp.int32),
            scale=1.0,
            pages_per_block=4,
            queries_per_block=16,
        )

    # The interpreter knows neither reshaped references nor masked stores to a part of one.
    with (
        mock.patch.object(copy, "wait", lambda self: wait(self)[...]),
        mock.patch.object(pltpu, "store", store),
    ):
        found = counted(run)
    expected = rivals.ragged_counts(
        q_lens, kv_lens, num_tokens=num_tokens, head_blocks=1, block_kv=64, block_q=16
    )
    assert keep(found, expected) == expected
