"""Facts of the TPUs that the project compiles for: the one table, per JAX device."""

from dataclasses import dataclass

from tpu_vl.errors import ConfigError

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One JAX device: a chip, or one of the two halves of a TPU7x chip.

    Args:
        name: as in topology names: "v5e", "v5p", "v6e", "tpu7x".
        kind: what jax calls it (`device.device_kind`).
        devices_per_chip: that jax lists.
        hbm_bytes: memory that a program may use on one device: what the compiler leaves it.
        hbm_bytes_per_s: its bandwidth.
        vmem_bytes: vector memory of one core, which one kernel may fill.
        bf16_flops: per second, multiply and add counted apart.
        int8_ops: the same for int8; 0: no such unit.
        fp8_flops: the same for float8_e4m3fn; 0: it is converted first.
        ici_bytes_per_s: to the other chips, all links and both directions together.
        ici_links: links of a chip: 4 in a two-dimensional torus, 6 in a three-dimensional one.
        clock_hz: cycles per second in the compiler's own estimates: `bf16_flops` over the
            operations that the matrix units do in a cycle.
    """

    name: str
    kind: str
    devices_per_chip: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    vmem_bytes: int
    bf16_flops: float
    int8_ops: float
    fp8_flops: float
    ici_bytes_per_s: float
    ici_links: int
    clock_hz: float


# `hbm_bytes` is what libtpu's compiler (jax 0.10.2) answers to a program of 400 GiB: "exceeds
# available HBM (31.25G)" and so on; what the chip has beyond that, the runtime keeps.
# Vendor pages of late 2026; VMEM and kinds as in jax/_src/pallas/mosaic/tpu_info.py (jax 0.10.2).
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            kind="TPU v5 lite",
            devices_per_chip=1,
            hbm_bytes=int(15.75 * _GIB),
            hbm_bytes_per_s=819e9,
            vmem_bytes=128 * _MIB,
            bf16_flops=197e12,
            int8_ops=393e12,
            fp8_flops=0,
            ici_bytes_per_s=400e9,
            ici_links=4,
            clock_hz=1.5e9,
        ),
        Chip(
            name="v5p",
            kind="TPU v5",
            devices_per_chip=1,
            hbm_bytes=int(95.74 * _GIB),
            hbm_bytes_per_s=2765e9,
            vmem_bytes=64 * _MIB,
            bf16_flops=459e12,
            int8_ops=918e12,
            fp8_flops=0,
            ici_bytes_per_s=1200e9,
            ici_links=6,
            clock_hz=1.75e9,
        ),
        Chip(
            name="v6e",
            kind="TPU v6 lite",
            devices_per_chip=1,
            hbm_bytes=int(31.25 * _GIB),
            hbm_bytes_per_s=1638e9,
            vmem_bytes=128 * _MIB,
            bf16_flops=918e12,
            int8_ops=1836e12,
            fp8_flops=0,
            ici_bytes_per_s=800e9,
            ici_links=4,
            clock_hz=1.75e9,
        ),
        Chip(
            name="tpu7x",
            kind="TPU7x",
            devices_per_chip=2,
            hbm_bytes=int(94.75 * _GIB),
            hbm_bytes_per_s=3690e9,
            vmem_bytes=64 * _MIB,
            bf16_flops=1153.5e12,
            int8_ops=0,
            fp8_flops=2307e12,
            ici_bytes_per_s=1200e9,
            ici_links=6,
            clock_hz=2.2e9,
        ),
    )
}


def chip_of(device_kind: str) -> Chip:
    """The facts of a device by what jax calls it.

    Raises:
        ConfigError: a device that is not in the table; add its row to kernels/chips.py.
    """
    for chip in CHIPS.values():
        if chip.kind == device_kind:
            return chip
    known = ", ".join(f"{c.kind!r} ({c.name})" for c in CHIPS.values())
    raise ConfigError(f"device kind {device_kind!r} is none of {known}: use one of these TPUs")
