"""What lives on the device between steps: one donated tree, indexed by pages, rows and slots."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tpu_vl.config import EngineConfig
from tpu_vl.engine.layout import BIAS_CAPACITY
from tpu_vl.kernels.paged_attention.api import cache_dtype, cache_shape, cache_spec
from tpu_vl.kernels.sharding import heads_axis
from tpu_vl.mesh import MODEL, platform
from tpu_vl.models.family import Backend, Family
from tpu_vl.tree import pytree

_WHOLE = PartitionSpec()


@pytree
class DeviceState:
    """Caches, pool and slots; every program takes it, changes it and gives it back.

    Args:
        caches_LSCH: one array per layer of each declared cache: pages, tokens of a page, K and V
            heads, head width.
        pool_RJD: encoded media rows, levels, text width; the last row is never written and stays
            zero. None in a text-only process.
        hidden_XPD: the tower's hidden rows between slices of one call: of each bin, its share of
            the largest patch capacity; None in a text-only process.
        page_table_BL: int32 pages of each slot's sequence, in order; stale past its length.
        last_token_B: int32 newest token of each slot.
        counts_BV: uint16 per slot and token id: PROMPT_BIT and the number of answer tokens.
            Kept only where a penalty is on.
        bias_id_BZ: int32 token ids of each slot's logit_bias.
        bias_value_BZ: float32 their values; 0 where unused.
    """

    caches_LSCH: tuple[jax.Array, ...]
    pool_RJD: jax.Array | None
    hidden_XPD: jax.Array | None
    page_table_BL: jax.Array
    last_token_B: jax.Array
    counts_BV: jax.Array
    bias_id_BZ: jax.Array
    bias_value_BZ: jax.Array


def abstract_state(
    family: Family, cfg: Any, engine_config: EngineConfig, backend: Backend
) -> DeviceState:
    """The state's shapes and shardings; nothing else of the engine takes device memory.

    Args:
        family: the model's family.
        cfg: its model config.
        engine_config: sizes.
        backend: the mesh, and the attention whose cache format is used.

    Returns:
        DeviceState of jax.ShapeDtypeStruct with shardings: cache heads over "model" where the
        K/V heads divide, pool width and token counts over "model" where they divide, a bin's hidden
        rows on its own device, the rest on every device.
    """
    mesh, dtype, num_slots = (
        backend.mesh,
        jnp.dtype(engine_config.dtype),
        engine_config.max_num_seqs,
    )

    def array(shape: tuple[int, ...], of: Any, spec: PartitionSpec = _WHOLE) -> Any:
        return jax.ShapeDtypeStruct(shape, of, sharding=NamedSharding(mesh, spec))

    caches = []
    for declared in family.caches(cfg):
        shape = cache_shape(
            engine_config.num_pages,
            engine_config.page_size,
            declared.num_kv_heads,
            declared.head_dim,
            backend.paged_attention,
        )
        pages_dtype = cache_dtype(engine_config.dtype, platform(mesh))
        one = array(shape, pages_dtype, cache_spec(declared.num_kv_heads, mesh))
        caches.extend([one] * declared.num_layers)
    pool = hidden = None
    if engine_config.modalities:
        geometry, width = family.geometry(cfg), family.text_width(cfg)
        pool = array(
            (engine_config.pool_rows + 1, 1 + geometry.num_levels, width),
            dtype,
            PartitionSpec(None, None, heads_axis(width, mesh)),
        )
        num_bins = geometry.num_bins
        hidden = array(
            (num_bins, engine_config.patch_capacities[-1] // num_bins, geometry.width),
            dtype,
            PartitionSpec(MODEL if num_bins > 1 else None),
        )
    vocab = family.logits_width(cfg)
    return DeviceState(
        caches_LSCH=tuple(caches),
        pool_RJD=pool,
        hidden_XPD=hidden,
        page_table_BL=array((num_slots, engine_config.max_pages_per_seq), jnp.int32),
        last_token_B=array((num_slots,), jnp.int32),
        counts_BV=array(
            (num_slots, vocab), jnp.uint16, PartitionSpec(None, heads_axis(vocab, mesh))
        ),
        bias_id_BZ=array((num_slots, BIAS_CAPACITY), jnp.int32),
        bias_value_BZ=array((num_slots, BIAS_CAPACITY), jnp.float32),
    )


def zeros(abstract: DeviceState) -> DeviceState:
    """The state at start: all zero. Pure: compile it with `abstract`'s shardings as outputs."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract)
