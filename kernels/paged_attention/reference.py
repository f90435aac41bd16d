"""Paged attention in plain XLA: `dense`, the truth, and `blocked`, which serves on CPU and GPU."""

import jax
import jax.numpy as jnp
from jax import lax

from tpu_vl.kernels import online_softmax
from tpu_vl.kernels.checks import precision, round_up
from tpu_vl.kernels.paged_attention.pages import Batch, gather_heads, token_rows, write_pages
from tpu_vl.kernels.paged_attention.tiles import Tiles, make_tiles

SMALL_BATCH = 32  # tokens up to which every token is a tile: one pass, half the program
DECODE_GROUP = 16  # single tokens per iteration
PREFILL_TILE = 64  # queries per iteration
KEY_BLOCK = 256  # cached tokens per iteration


def dense(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pages_LSCH: jax.Array,
    batch: Batch,
    *,
    scale: float,
    kv_scales_2K: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Every token's logits against the whole context of every sequence, masked, in float32."""
    num_tokens, num_heads, width = q_TNH.shape
    num_kv_heads = k_TKH.shape[1]
    pages_LSCH = write_pages(pages_LSCH, k_TKH, v_TKH, batch, kv_scales_2K)
    num_seqs, num_entries = batch.page_table_BM.shape
    num_slots = pages_LSCH.shape[1]
    seq_T, position_T, valid_T = token_rows(batch, num_tokens)
    found = gather_heads(
        pages_LSCH, batch.page_table_BM.reshape(1, -1), num_kv_heads, width, kv_scales_2K
    )
    seq_X = jnp.repeat(jnp.arange(num_seqs), num_entries * num_slots)
    position_X = jnp.tile(jnp.arange(num_entries * num_slots), num_seqs)
    live_X = position_X < batch.kv_lens_B[seq_X]
    k_KXH, v_KXH = (jnp.where(live_X[:, None], x[0].astype(jnp.float32), 0) for x in found)
    q_TKGH = jnp.where(valid_T[:, None, None], q_TNH, 0).astype(jnp.float32)
    q_TKGH = q_TKGH.reshape(num_tokens, num_kv_heads, -1, width)
    logits_KGTX = scale * jnp.einsum(
        "tkgh,kxh->kgtx", q_TKGH, k_KXH, precision=lax.Precision.HIGHEST
    )
    seen_TX = (seq_T[:, None] == seq_X) & (position_X <= position_T[:, None]) & valid_T[:, None]
    weights_KGTX = jax.nn.softmax(jnp.where(seen_TX, logits_KGTX, online_softmax.MASKED), axis=-1)
    out_TKGH = jnp.einsum("kgtx,kxh->tkgh", weights_KGTX, v_KXH, precision=lax.Precision.HIGHEST)
    out_TNH = out_TKGH.reshape(num_tokens, num_heads, width)
    return jnp.where(valid_T[:, None, None], out_TNH, 0).astype(q_TNH.dtype), pages_LSCH


def kv_blocks(tiles: Tiles, group: int, block: int) -> jax.Array:
    """Key blocks that each group of `group` tiles visits: up to its furthest causal limit."""
    return (tiles.limit_I.reshape(-1, group).max(axis=1) + block - 1) // block


def blocked(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pages_LSCH: jax.Array,
    batch: Batch,
    *,
    scale: float,
    kv_scales_2K: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Online softmax over key blocks, for single tokens many sequences at a time.

    Sequences with one new token (decoding) share an iteration, since each alone is too small an
    operation; longer runs (prefill) take an iteration per tile, so that a key block is gathered
    once for many queries. Each pass costs nothing where it has no tile.
    """
    num_tokens = q_TNH.shape[0]
    pages_LSCH = write_pages(pages_LSCH, k_TKH, v_TKH, batch, kv_scales_2K)
    q_lens_B = batch.q_lens_B
    passes = [(1, DECODE_GROUP, q_lens_B)]
    if num_tokens > SMALL_BATCH:
        single_B = q_lens_B <= 1
        passes = [
            (1, DECODE_GROUP, jnp.where(single_B, q_lens_B, 0)),
            (PREFILL_TILE, 1, jnp.where(single_B, 0, q_lens_B)),
        ]
    out_TNH = jnp.zeros_like(q_TNH)
    for tile, group, lens_B in passes:
        most = min(num_tokens, num_tokens // tile + len(lens_B))
        tiles = make_tiles(batch, lens_B, tile, round_up(most, group))
        out_TNH = attend_tiles(
            out_TNH,
            q_TNH,
            pages_LSCH,
            batch,
            tiles,
            k_TKH.shape[1],
            kv_scales_2K,
            tile=tile,
            scale=scale,
        )
    return out_TNH, pages_LSCH


def attend_tiles(
    out_TNH: jax.Array,
    q_TNH: jax.Array,
    pages_LSCH: jax.Array,
    batch: Batch,
    tiles: Tiles,
    num_kv_heads: int,
    kv_scales_2K: jax.Array | None,
    *,
    tile: int,
    scale: float,
) -> jax.Array:
    """Fills the rows of `out_TNH` that the live tiles cover, a group of tiles per iteration."""
    group = DECODE_GROUP if tile == 1 else 1
    num_tokens, num_heads, width = q_TNH.shape
    page_size = pages_LSCH.shape[1]
    num_entries = batch.page_table_BM.shape[1]
    block_pages = min(num_entries, max(1, KEY_BLOCK // page_size))
    block = block_pages * page_size
    table_BM = jnp.pad(batch.page_table_BM, ((0, 0), (0, -num_entries % block_pages)))
    count_J = kv_blocks(tiles, group, block)
    exact = precision(q_TNH.dtype)
    rows_per_tile = tile * (num_heads // num_kv_heads)

    def tile_group(j: jax.Array, out_TNH: jax.Array) -> jax.Array:
        seq_I, row_I, num_rows_I, position_I, limit_I = (
            lax.dynamic_slice_in_dim(x, j * group, group)
            for x in (tiles.seq_I, tiles.row_I, tiles.num_rows_I, tiles.position_I, tiles.limit_I)
        )
        offset_R = jnp.arange(tile)
        row_IR = jnp.where(offset_R < num_rows_I[:, None], row_I[:, None] + offset_R, num_tokens)
        q = q_TNH[jnp.minimum(row_IR, num_tokens - 1)]
        q = q.reshape(group, tile, num_kv_heads, -1, width)
        q_IKRH = jnp.swapaxes(q, 1, 2).reshape(group, num_kv_heads, rows_per_tile, width)
        position_IR = position_I[:, None] + jnp.repeat(offset_R, rows_per_tile // tile)

        def key_block(i: jax.Array, state: online_softmax.State) -> online_softmax.State:
            page_IM = lax.dynamic_slice_in_dim(table_BM, i * block_pages, block_pages, 1)[seq_I]
            k_IKXH, v_IKXH = (
                x.astype(q_TNH.dtype)
                for x in gather_heads(pages_LSCH, page_IM, num_kv_heads, width, kv_scales_2K)
            )
            position_X = i * block + jnp.arange(block)
            live_IX = position_X < limit_I[:, None]
            v_IKXH = jnp.where(live_IX[:, None, :, None], v_IKXH, 0)
            logits_IKRX = scale * jnp.einsum(
                "ikrh,ikxh->ikrx",
                q_IKRH,
                k_IKXH,
                precision=exact,
                preferred_element_type=jnp.float32,
            )
            seen_IRX = (position_X <= position_IR[..., None]) & live_IX[:, None]
            return online_softmax.update(state, logits_IKRX, seen_IRX[:, None], v_IKXH, exact)

        start = online_softmax.start(q_IKRH.shape)
        _, total_IKR, sum_IKRH = lax.fori_loop(0, count_J[j], key_block, start)
        found = (sum_IKRH / total_IKR[..., None]).astype(out_TNH.dtype)
        found = found.reshape(group, num_kv_heads, tile, -1, width)
        found_IRNH = jnp.swapaxes(found, 1, 2).reshape(group, tile, num_heads, width)
        return out_TNH.at[row_IR].set(found_IRNH, mode="drop")

    return lax.fori_loop(0, (tiles.num_live + group - 1) // group, tile_group, out_TNH)
