"""What the TPU compiler is asked beyond its defaults, by chip and program."""

from collections.abc import Mapping

from jax.sharding import Mesh

from tpu_vl.kernels.chips import chip_of
from tpu_vl.mesh import platform

_KIB = 1 << 10
_MIB = 1 << 20

# Of vector memory, what one fusion may take for the windows of its operands, for batches of up to
# so many tokens. What it leaves holds weights that are fetched ahead of their product. The
# compiler's own share on v6e is 32 MiB. In the 36 layers of the 8B on 4 devices it leaves first
# products of the MLP that wait for their weights: 1.20 times their bytes of 64 tokens, 1.23 times
# their FLOPs of 1,024. With these values none does, and 1,024 tokens take 2 % fewer cycles; 2,048
# take 0.7 % more with 28 MiB than with 32.
_WINDOW_BYTES = {"v6e": ((256, 40 * _MIB), (1024, 28 * _MIB))}


def of_text(mesh: Mesh, num_tokens: int) -> Mapping[str, str]:
    """Options of a text program.

    Args:
        mesh: where it runs.
        num_tokens: T.

    Returns:
        Names and values as `jax.stages.Lowered.compile` takes them; none where no
        measurement speaks for one.
    """
    if platform(mesh) != "tpu":
        return {}
    windows = _WINDOW_BYTES.get(chip_of(mesh.devices.flat[0].device_kind).name, ())
    for most_tokens, num_bytes in windows:
        if num_tokens <= most_tokens:
            return {"xla_tpu_scoped_vmem_limit_kib": str(num_bytes // _KIB)}
    return {}
