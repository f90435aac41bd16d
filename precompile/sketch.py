"""The footprint of a model that has no serving code here: from its config values alone.

Experts are split over all devices, heads and widths likewise where they divide, K/V heads are
copied where devices outnumber them. Caches and slots are laid out as the served families have them.
"""

from tpu_vl.config import EngineConfig
from tpu_vl.engine.layout import BIAS_CAPACITY
from tpu_vl.kernels.checks import NUM_LANES, round_up
from tpu_vl.models.tensor_parallel import held_kv_heads
from tpu_vl.precompile.footprint import Footprint, device_bytes, weight_bytes
from tpu_vl.precompile.program_sizes import ModelShape, program_sizes
from tpu_vl.precompile.sizes import ModelSizes

_VALUE_BYTES = 2


def page_bytes(sizes: ModelSizes, engine_config: EngineConfig) -> int:
    """Bytes of one KV page on one device, over all layers with paged attention."""
    d, n = sizes.decoder, engine_config.tensor_parallel_size
    heads = held_kv_heads(d.num_kv_heads, n) // n
    width = round_up(d.head_dim, NUM_LANES)
    page = (1, engine_config.page_size, 2 * heads, width)
    return d.num_attention_layers * device_bytes(page, "bfloat16")


def footprint(
    sizes: ModelSizes, engine_config: EngineConfig, layer_value_bytes: int = _VALUE_BYTES
) -> Footprint:
    """The footprint on one device.

    Args:
        sizes: of the model.
        engine_config: sizes of a server; its tensor-parallel size counts all devices.
        layer_value_bytes: of one weight of the decoder's layers and experts; embeddings, output
            and tower stay bfloat16.
    """
    d, e, n = sizes.decoder, engine_config, engine_config.tensor_parallel_size
    quantised = [w for w in sizes.weights if w.kind in ("layer", "expert")]
    others = [
        w
        for w in sizes.weights
        if w.kind in ("embed", "head", "lookup") or (w.kind == "tower" and e.modalities)
    ]
    weights = weight_bytes(quantised, n, layer_value_bytes) + weight_bytes(others, n, _VALUE_BYTES)
    pool, tower = 0, sizes.tower
    if tower is not None and e.modalities:
        row = (e.pool_rows, tower.num_mergers, d.width // n)
        pool = device_bytes(row, "bfloat16")
        pool += device_bytes((e.patch_capacities[-1], tower.width), "bfloat16")
    slots = e.max_num_seqs
    state = (
        device_bytes((slots, d.vocab_size), "uint16")
        + device_bytes((slots, e.max_pages_per_seq), "int32")
        + 2 * device_bytes((slots, BIAS_CAPACITY), "int32")
        + slots * d.state_bytes // n
    )
    programs = program_sizes(model_shape(sizes, n), e)
    return Footprint(
        weights=weights,
        kv=e.num_pages * page_bytes(sizes, e),
        pool=pool,
        state=state,
        temporaries=0,
        code=0,
    ).with_programs(programs)


def model_shape(sizes: ModelSizes, num_devices: int) -> ModelShape:
    """What the sizes of the programs would follow from, if they were like the served ones."""
    d, tower = sizes.decoder, sizes.tower
    heads = tower.num_heads if tower else 0
    return ModelShape(
        num_layers=d.num_layers,
        width=d.width,
        vocab_size=d.vocab_size,
        num_devices=num_devices,
        tower_width=tower.width if tower else 0,
        tower_heads=heads if heads % num_devices else heads // num_devices,
    )
