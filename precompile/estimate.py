"""How long a step will take on a chip, by roofline: pure formulas of sizes, no measurement.

A part takes the longer of its bytes over the memory's bandwidth and its operations over the matrix
units' peak; collectives are added, each with its bytes over the links of a ring and a stated
latency. `estimate` counts what the programs really do (capacities, padded heads, weights that are
read again for each block of rows, collectives); `roofline` is what the work itself costs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tpu_vl.kernels.chips import Chip

TowerMode = Literal["weights", "data"]

HOP_S = 1e-6
"""Latency of one hop of a collective between neighbours."""

LANES = 128
"""Head widths below this fill a whole pass of the matrix units in attention."""

LOGIT_PASSES = 8
"""Passes of a sampling step over its float32 logits: two of the matrix product, the rest of the
maximum, the penalties, the draw and the log-probabilities."""

_VALUE_BYTES = 2
_RING_LINKS = 2  # a ring leaves and enters a device by one link each way


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Work of one device.

    Args:
        flops: multiply and add counted apart.
        hbm_bytes: read and written.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(flops=self.flops + other.flops, hbm_bytes=self.hbm_bytes + other.hbm_bytes)

    def __mul__(self, times: float) -> "Cost":
        return Cost(flops=self.flops * times, hbm_bytes=self.hbm_bytes * times)

    def seconds(self, chip: Chip) -> float:
        """The roofline: the longer of memory and arithmetic, in seconds."""
        return max(self.hbm_bytes / chip.hbm_bytes_per_s, self.flops / chip.bf16_flops)


def ring_bytes_per_s(chip: Chip) -> float:
    """What a device sends in one direction of a ring while it receives as much."""
    return chip.ici_bytes_per_s / 2 * _RING_LINKS / chip.ici_links


def all_gather_s(num_bytes: float, num_devices: int, chip: Chip) -> float:
    """Time of an all-gather (or reduce-scatter) whose whole result is `num_bytes`, in seconds."""
    if num_devices == 1:
        return 0.0
    share = (num_devices - 1) / num_devices
    return num_bytes * share / ring_bytes_per_s(chip) + math.ceil(num_devices / 2) * HOP_S


def all_reduce_s(num_bytes: float, num_devices: int, chip: Chip) -> float:
    """Time of an all-reduce of `num_bytes` a device, in seconds: scatter, then gather."""
    return 2 * all_gather_s(num_bytes, num_devices, chip)


@dataclass(frozen=True, kw_only=True)
class TowerSizes:
    """What a vision tower's time follows from.

    Args:
        depth, width, num_heads, head_dim, mlp_width: of its layers.
        patch_width: values of one patch.
        merge_cells: patches of one merged cell.
        out_width: of a pool row.
        num_mergers: 1 and the DeepStack levels.
        mlp_matrices: 2, or 3 with a gate.
    """

    depth: int
    width: int
    num_heads: int
    head_dim: int
    mlp_width: int
    patch_width: int
    merge_cells: int
    out_width: int
    num_mergers: int
    mlp_matrices: int = 2

    @classmethod
    def of(cls, dims: Mapping[str, int], num_levels: int) -> "TowerSizes":
        """Sizes from a family's table `dims(cfg)["vision"]` and its DeepStack levels."""
        return cls(
            depth=dims["Y"],
            width=dims["D"],
            num_heads=dims["N"],
            head_dim=dims["H"],
            mlp_width=dims["F"],
            patch_width=dims["W"],
            merge_cells=dims["G"] // dims["D"],
            out_width=dims["O"],
            num_mergers=1 + num_levels,
        )


def tower_layer_seconds(
    tower: TowerSizes,
    num_patches: int,
    num_frames: int,
    chip: Chip,
    tensor_parallel_size: int,
    mode: TowerMode,
    row_block: int = 1_024,
) -> float:
    """One tower layer over a packed call, in seconds.

    Args:
        tower: sizes.
        num_patches: valid patches of the call, whole frames of equal size.
        num_frames: frames that they belong to, >= 1; attention stays inside a frame.
        chip: where it runs.
        tensor_parallel_size: devices on the "model" axis.
        mode: "weights" shards heads and MLP and reduces twice a block; "data" gives each device
            whole frames and the whole tower, without collectives.
        row_block: rows of the linear parts for which the weights are read once.
    """
    frame_patches = num_patches / num_frames
    if mode == "data":
        frames = math.ceil(num_frames / tensor_parallel_size)
        return _layer_cost(tower, frames * frame_patches, frames, 1, row_block).seconds(chip)
    local = _layer_cost(tower, num_patches, num_frames, tensor_parallel_size, row_block)
    blocks = math.ceil(num_patches / row_block)
    reduced = min(row_block, num_patches) * tower.width * _VALUE_BYTES
    return local.seconds(chip) + 2 * blocks * all_reduce_s(reduced, tensor_parallel_size, chip)


def _layer_cost(
    tower: TowerSizes, num_patches: float, num_frames: int, num_shards: int, row_block: int
) -> Cost:
    d, f, matrices = tower.width, tower.mlp_width, tower.mlp_matrices
    inner = tower.num_heads * tower.head_dim
    weights = (4 * d * inner + matrices * d * f) / num_shards
    blocks = math.ceil(num_patches / row_block)
    # Rows: hidden twice in and once out, q, k, v out, attended in; a block of the MLP's inside
    # stays in vector memory.
    values = 3 * d + 4 * inner / num_shards
    linear = Cost(
        flops=2 * weights * num_patches,
        hbm_bytes=_VALUE_BYTES * (weights * blocks + values * num_patches),
    )
    # Heads that do not divide stay whole on every device.
    shards = num_shards if tower.num_heads % num_shards == 0 else 1
    padded = tower.num_heads * max(tower.head_dim, LANES) / shards
    attention = Cost(
        flops=4 * padded * num_patches**2 / num_frames,
        hbm_bytes=_VALUE_BYTES * 4 * padded * num_patches,
    )
    return linear + attention


def tower_ends_seconds(
    tower: TowerSizes,
    num_patches: int,
    chip: Chip,
    tensor_parallel_size: int,
    row_block: int = 1_024,
) -> float:
    """Patch embedding and mergers of a call, in seconds: what is not in a layer."""
    cell_width = tower.width * tower.merge_cells
    embed = tower.patch_width * tower.width
    merger = cell_width * (cell_width + tower.out_width) / tensor_parallel_size
    cells = num_patches / tower.merge_cells
    blocks = math.ceil(num_patches / row_block)
    work = Cost(
        flops=2 * (embed * num_patches / tensor_parallel_size + merger * cells * tower.num_mergers),
        hbm_bytes=num_patches * (tower.patch_width + 3 * tower.width * _VALUE_BYTES)
        + _VALUE_BYTES * (embed + merger * blocks * tower.num_mergers),
    )
    hidden = num_patches * tower.width * _VALUE_BYTES
    rows = min(cells, row_block / tower.merge_cells) * tower.out_width * _VALUE_BYTES
    collectives = all_gather_s(hidden, tensor_parallel_size, chip)
    collectives += blocks * tower.num_mergers * all_reduce_s(rows, tensor_parallel_size, chip)
    return work.seconds(chip) + collectives


def tower_seconds(
    tower: TowerSizes,
    num_patches: int,
    num_frames: int,
    chip: Chip,
    tensor_parallel_size: int,
    mode: TowerMode,
    row_block: int = 1_024,
) -> float:
    """The whole tower over one packed call, in seconds; arguments as of `tower_layer_seconds`."""
    layer = tower_layer_seconds(
        tower, num_patches, num_frames, chip, tensor_parallel_size, mode, row_block
    )
    ends = tower_ends_seconds(tower, num_patches, chip, tensor_parallel_size, row_block)
    return tower.depth * layer + ends


def tower_mode(
    tower: TowerSizes, num_patches: int, num_frames: int, chip: Chip, tensor_parallel_size: int
) -> TowerMode:
    """The mode whose layer is estimated to be faster; "data" where heads do not divide."""
    if tower.num_heads % tensor_parallel_size:
        return "data"
    weights, data = (
        tower_layer_seconds(tower, num_patches, num_frames, chip, tensor_parallel_size, mode)
        for mode in ("weights", "data")
    )
    return "weights" if weights <= data else "data"


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """What a language model's time and memory follow from.

    Args:
        num_layers, width, vocab_size: sizes.
        dense_values: weights that every step reads, without embedding and output matrix:
            projections, dense and shared MLPs, routers, norms.
        num_experts: routed experts of a layer; 0: a dense model.
        experts_per_token: routed experts that a token visits.
        expert_values: weights of one routed expert, over all layers.
        num_attention_layers: layers with paged K and V.
        num_heads, num_kv_heads, head_dim: of those.
        state_bytes: recurrent state of one sequence over all layers; 0: none.
    """

    num_layers: int
    width: int
    vocab_size: int
    dense_values: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_values: int = 0
    num_attention_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    state_bytes: int = 0

    def experts_read(self, num_tokens: int) -> float:
        """Experts of a layer that a step of so many tokens visits, if routed evenly."""
        if not self.num_experts:
            return 0.0
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)


@dataclass(frozen=True, kw_only=True)
class Duration:
    """An estimated time with its roofline.

    Args:
        estimate_us: what the programs are expected to take, in microseconds.
        roofline_us: what the work itself takes at full bandwidth or peak, in microseconds.
    """

    estimate_us: float
    roofline_us: float


def _decoder_cost(
    decoder: DecoderSizes,
    num_tokens: int,
    num_rows: int,
    num_sequences: int,
    attended: float,
    cached: float,
    num_shards: int,
    logit_passes: int,
) -> tuple[Cost, Cost, Cost]:
    """Layers, attention and output of one device.

    Args:
        attended: pairs of query and key over all sequences.
        cached: tokens whose K and V are read.
    """
    active = decoder.dense_values + decoder.experts_per_token * decoder.expert_values
    read = decoder.dense_values + decoder.experts_read(num_tokens) * decoder.expert_values
    layers = Cost(
        flops=2 * active * num_tokens / num_shards,
        hbm_bytes=(_VALUE_BYTES * read + 2 * decoder.state_bytes * num_sequences) / num_shards,
    )
    heads = decoder.num_heads / num_shards
    kv_heads = max(decoder.num_kv_heads / num_shards, 1)
    attention = Cost(
        flops=4 * heads * decoder.head_dim * attended * decoder.num_attention_layers,
        hbm_bytes=_VALUE_BYTES
        * 2
        * kv_heads
        * decoder.head_dim
        * cached
        * decoder.num_attention_layers,
    )
    head = decoder.vocab_size * decoder.width / num_shards
    logits = num_rows * decoder.vocab_size / num_shards
    output = Cost(
        flops=2 * head * num_rows,
        hbm_bytes=_VALUE_BYTES * head + 4 * logit_passes * logits,
    )
    return layers, attention, output


def _step(
    decoder: DecoderSizes,
    *,
    num_tokens: int,
    capacity: int,
    num_sequences: int,
    row_capacity: int,
    attended: float,
    cached: float,
    chip: Chip,
    num_devices: int,
) -> Duration:
    ideal = _decoder_cost(
        decoder, num_tokens, num_sequences, num_sequences, attended, cached, num_devices, 0
    )
    done = _decoder_cost(
        decoder,
        capacity,
        row_capacity,
        num_sequences,
        attended,
        cached,
        num_devices,
        LOGIT_PASSES,
    )
    hidden = capacity * decoder.width * _VALUE_BYTES
    # Two reductions a layer, and three of a few numbers a row where the vocabulary is split.
    collectives = 2 * decoder.num_layers * all_reduce_s(hidden, num_devices, chip)
    collectives += 3 * all_reduce_s(row_capacity * 8, num_devices, chip)
    return Duration(
        estimate_us=1e6 * (sum(part.seconds(chip) for part in done) + collectives),
        roofline_us=1e6 * sum(ideal, Cost()).seconds(chip),
    )


def capacity_of(size: int, capacities: tuple[int, ...]) -> int | None:
    """The smallest capacity that holds `size`; None: too much for one call."""
    return next((c for c in capacities if c >= size), None)


def decode_step(
    decoder: DecoderSizes,
    num_sequences: int,
    context: int,
    chip: Chip,
    num_devices: int,
    capacities: tuple[int, ...],
) -> Duration | None:
    """A step that gives one token to each sequence, sampling included.

    Args:
        decoder: sizes.
        num_sequences: B, each with one new token.
        context: tokens in the cache of each sequence.
        chip: where it runs.
        num_devices: that weights and heads are split over.
        capacities: token capacities of the text programs, ascending.

    Returns:
        None where no program holds so many sequences.
    """
    capacity = capacity_of(num_sequences, capacities)
    if capacity is None:
        return None
    return _step(
        decoder,
        num_tokens=num_sequences,
        capacity=capacity,
        num_sequences=num_sequences,
        row_capacity=capacity,
        attended=num_sequences * context,
        cached=num_sequences * context,
        chip=chip,
        num_devices=num_devices,
    )


def prefill_step(
    decoder: DecoderSizes,
    num_tokens: int,
    chip: Chip,
    num_devices: int,
    capacities: tuple[int, ...],
    row_capacity: int,
) -> Duration | None:
    """A step that reads one new prompt of `num_tokens`, its first answer token included.

    Args:
        decoder, chip, num_devices, capacities: as for `decode_step`.
        num_tokens: of the prompt.
        row_capacity: hidden rows that the program of that capacity gives.

    Returns:
        None where no program holds so many tokens.
    """
    capacity = capacity_of(num_tokens, capacities)
    if capacity is None:
        return None
    return _step(
        decoder,
        num_tokens=num_tokens,
        capacity=capacity,
        num_sequences=1,
        row_capacity=row_capacity,
        attended=num_tokens * (num_tokens + 1) / 2,
        cached=num_tokens,
        chip=chip,
        num_devices=num_devices,
    )
