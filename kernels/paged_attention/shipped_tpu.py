"""Paged attention on TPUs: a scatter of K and V, then jax's own ragged paged attention kernel."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from tpu_vl.kernels.checks import NUM_LANES
from tpu_vl.kernels.paged_attention.pages import Batch, write_pages

KEY_BLOCK = 1024  # cached tokens per block
QUERY_BLOCK = 32  # queries per block
VMEM_LIMIT_BYTES = 64 << 20


def ragged(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pages_LSCH: jax.Array,
    batch: Batch,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Writes the pages, pads queries to the pages' width and runs the shipped kernel.

    Raises:
        ValueError: the pages are not whole lanes wide, or K does not tile; the message says which.
    """
    num_tokens, _, width = q_TNH.shape
    page_size, page_width = pages_LSCH.shape[1], pages_LSCH.shape[3]
    if page_width % NUM_LANES:
        raise ValueError(
            f"pages_LSCH is {page_width} wide; 'pallas' needs a multiple of {NUM_LANES}: allocate "
            "it with cache_shape(..., implementation='pallas')"
        )
    pages_LSCH = write_pages(pages_LSCH, k_TKH, v_TKH, batch)
    valid_T = jnp.arange(num_tokens) < batch.q_starts_B[-1]
    starts_B, kv_lens_B = _with_a_token(batch)
    with jax.default_matmul_precision("highest" if q_TNH.dtype == jnp.float32 else "default"):
        out_TNH = kernel.ragged_paged_attention(
            jnp.pad(q_TNH, ((0, 0), (0, 0), (0, page_width - width))),
            pages_LSCH,
            kv_lens_B,
            batch.page_table_BM,
            starts_B,
            jnp.maximum((batch.q_lens_B > 0).sum(dtype=jnp.int32), 1)[None],
            sm_scale=scale,
            num_kv_pages_per_block=min(
                batch.page_table_BM.shape[1], max(1, KEY_BLOCK // page_size)
            ),
            num_queries_per_block=min(num_tokens, QUERY_BLOCK),
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
        )[..., :width]
    return jnp.where(valid_T[:, None, None], out_TNH, 0), pages_LSCH


def _with_a_token(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Starts and lengths in which sequence 0 has a token: the kernel waits for it in any case."""
    empty = batch.q_starts_B[-1] == 0
    starts_B = jnp.where(empty & (jnp.arange(len(batch.q_starts_B)) > 0), 1, batch.q_starts_B)
    first = jnp.arange(len(batch.kv_lens_B)) == 0
    return starts_B, jnp.where(empty & first, 1, batch.kv_lens_B)
