"""Which sizes a model takes on so many devices: heads that must divide, copies, and zero padding.

Query heads are never padded: a device that idles in attention would cost what it was added for.
K/V heads that the axis does not divide are held several times, so that each device has those that
its query heads read. Widths without a meaning of their own (the MLP's, the vocabulary) are padded
with zeros, which add nothing to any sum.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from tpu_vl.errors import ConfigError
from tpu_vl.models.family import TensorMap


def check_heads(num_heads: int, num_kv_heads: int, num_shards: int) -> None:
    """Checks that the query heads of a language model divide over the devices.

    Args:
        num_heads: N, a multiple of `num_kv_heads`.
        num_kv_heads: K.
        num_shards: devices on the "model" axis.

    Raises:
        ConfigError: they do not; the message lists the sizes that fit.
    """
    if num_heads % num_shards == 0:
        return
    valid = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
    raise ConfigError(
        f"--tensor-parallel-size {num_shards} does not divide the {num_heads} query heads of the "
        f"language model ({num_kv_heads} K/V heads, which are copied where devices outnumber "
        f"them); use one of {valid}"
    )


def held_kv_heads(num_kv_heads: int, num_shards: int) -> int:
    """K/V heads in the tree and in the pages: each is held so often that the axis divides them.

    With N query heads, N / num_shards of them on each device, the least common multiple divides N,
    so every held head serves a run of whole query heads of one device.
    """
    return math.lcm(num_kv_heads, num_shards)


def as_held(
    maps: Iterable[TensorMap], file_sizes: Mapping[str, int], held_sizes: Mapping[str, int]
) -> tuple[TensorMap, ...]:
    """The maps with what the tree holds beyond the file: copies of K, zeros behind other dims.

    Args:
        maps: of one table of dims.
        file_sizes: dims in the checkpoint.
        held_sizes: dims in the tree.
    """
    copies = held_sizes.get("K", 1) // file_sizes.get("K", 1)
    padded = {d: n for d, n in file_sizes.items() if d != "K" and held_sizes[d] != n}
    out = []
    for one in maps:
        dims = set(one.layout)
        repeat = ("K", copies) if copies > 1 and "K" in dims else None
        found = [(d, n) for d, n in padded.items() if d in dims]
        if len(found) > 1:
            raise ValueError(f"{one.path} would be padded along {found}: one dim at most")
        out.append(dataclasses.replace(one, repeat=repeat, pad=found[0] if found else None))
    return tuple(out)
