"""What a model takes of one device's memory: by formula, before anything is compiled.

Weights, KV pages, pool and state are exact: the same abstract trees that the programs are compiled
from, in the compiler's own tiles. Temporaries and program code follow fitted formulas; how well
they fit is in docs/plan.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_vl.config import EngineConfig
from tpu_vl.engine.state import abstract_state
from tpu_vl.kernels.checks import round_up
from tpu_vl.mesh import model_size, platform
from tpu_vl.models.family import Backend, Family, placed_params
from tpu_vl.precompile.program_sizes import ModelShape, ProgramSize, program_sizes
from tpu_vl.precompile.sizes import Weight

RUNTIME_RESERVE_BYTES = 256 << 20
"""Left to the runtime: inputs and results in flight, one more step's temporaries among them."""

_LANES, _SUBLANES, _TILE_1D = 128, 8, 1024


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one device.

    Args:
        weights: params of tower and language model.
        kv: paged caches.
        pool: media rows, and the tower's hidden rows between slices.
        state: page tables, token counts and what else a slot holds.
        temporaries: the largest of any program, its results that replace nothing included.
        code: all programs.
    """

    weights: int
    kv: int
    pool: int
    state: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.weights + self.kv + self.pool + self.state + self.temporaries + self.code

    def with_programs(self, programs: Mapping[str, ProgramSize]) -> "Footprint":
        """The footprint with the largest temporaries and all code of these programs."""
        return replace(
            self,
            temporaries=max(p.temporaries for p in programs.values()),
            code=sum(p.code for p in programs.values()),
        )


def device_bytes(shape: Sequence[int], dtype: Any, platform_name: str = "tpu") -> int:
    """Bytes that one array takes on one device, padding of the tiles included.

    A TPU holds the two innermost dims of a layout in tiles of 8 rows of 128 lanes (fewer rows where
    the dim is small: a power of two). The compiler is free to order the dims of an argument and
    takes the order that pads least.

    Args:
        shape: on the device itself.
        dtype: of the values.
        platform_name: "tpu"; others hold arrays as they are.
    """
    size = jnp.dtype(dtype).itemsize
    if platform_name != "tpu" or not shape:
        return max(math.prod(shape), 1) * size
    packed = 4 // size if size < 4 else 1
    if len(shape) == 1:
        low = _LANES * packed
        tile = min(_TILE_1D, max(low, 1 << (shape[0] - 1).bit_length()))
        return -(-shape[0] // tile) * tile * size
    total = math.prod(shape)
    return min(
        total // (lanes * rows) * round_up(lanes, _LANES) * _rows(rows, packed) * size
        for i, lanes in enumerate(shape)
        for j, rows in enumerate(shape)
        if i != j
    )


def _rows(rows: int, packed: int) -> int:
    if rows >= _SUBLANES:
        return round_up(rows, _SUBLANES)
    return max(1 << (rows - 1).bit_length(), packed)


def tree_bytes(tree: Any, platform_name: str) -> int:
    """Bytes of one device's shards of an abstract tree whose leaves carry shardings."""
    return sum(
        device_bytes(a.sharding.shard_shape(a.shape), a.dtype, platform_name)
        for a in jax.tree.leaves(tree)
    )


def weight_bytes(weights: Sequence[Weight], num_devices: int, value_bytes: int) -> int:
    """Bytes of one device where no abstract tree exists: each array split over all devices.

    Args:
        weights: of `sizes.model_sizes`.
        num_devices: that the dims marked `split` are divided by, where they divide.
        value_bytes: of one value.
    """
    return sum(math.prod(w.local_shape(num_devices)) * w.count for w in weights) * value_bytes


def page_bytes(family: Family, cfg: Any, engine_config: EngineConfig, backend: Backend) -> int:
    """Bytes that one more KV page takes on one device, over all layers."""
    one = replace(engine_config, num_pages=engine_config.max_pages_per_seq)
    more = replace(engine_config, num_pages=engine_config.max_pages_per_seq + 1)
    name = platform(backend.mesh)
    held = [
        tree_bytes(abstract_state(family, cfg, e, backend).caches_LSCH, name) for e in (one, more)
    ]
    return held[1] - held[0]


def footprint(family: Family, cfg: Any, engine_config: EngineConfig, backend: Backend) -> Footprint:
    """The footprint of a family with serving code, on one device.

    Args:
        family, cfg: the model as it is held on the mesh.
        engine_config: sizes.
        backend: the mesh, of real, described or named devices, and the attention whose pages are
            used.
    """
    name = platform(backend.mesh)
    params = placed_params(family, cfg, engine_config.dtype, backend.mesh)
    state = abstract_state(family, cfg, engine_config, backend)
    kv = tree_bytes(state.caches_LSCH, name)
    pool = tree_bytes((state.pool_RJD, state.hidden_XPD), name)
    programs = program_sizes(model_shape(family, cfg, backend.mesh), engine_config)
    return Footprint(
        weights=tree_bytes(params, name),
        kv=kv,
        pool=pool,
        state=tree_bytes(state, name) - kv - pool,
        temporaries=max(p.temporaries for p in programs.values()),
        code=sum(p.code for p in programs.values()),
    )


def with_pages(
    smallest: EngineConfig, held: Footprint, one_page: int, budget_bytes: float
) -> EngineConfig:
    """The config with as many KV pages as a budget holds, one longest sequence at the least.

    Args:
        smallest: with the pages of one longest sequence.
        held: its footprint.
        one_page: bytes of a page on one device.
        budget_bytes: that one device may be filled with.
    """
    left = budget_bytes - RUNTIME_RESERVE_BYTES - held.total
    most = smallest.max_num_seqs * smallest.max_pages_per_seq
    pages = smallest.num_pages + max(int(left // one_page), 0)
    return replace(smallest, num_pages=min(pages, most))


def model_shape(family: Family, cfg: Any, mesh: Mesh) -> ModelShape:
    """What the sizes of a family's programs follow from."""
    tables, n = family.dims(cfg), model_size(mesh)
    text, tower = tables["text"], tables.get("vision", {})
    num_bins = family.geometry(cfg).num_bins if tower else 1
    heads = tower.get("N", 0)
    return ModelShape(
        num_layers=sum(c.num_layers for c in family.caches(cfg)),
        width=text["D"],
        vocab_size=text["V"],
        num_devices=n,
        tower_width=tower.get("D", 0),
        tower_heads=heads if num_bins > 1 or heads % n else heads // n,
        num_bins=num_bins,
    )
