"""Counting by control flow alone agrees with counting a whole run."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from bench import own, visits
from tpu_vl.kernels.interpret import COMPILER_OPTIONS, Target
from tpu_vl.kernels.paged_attention.blocks import Blocks
from tpu_vl.kernels.paged_attention.cases import Case

BLOCKS = Blocks(decode_keys=128, prefill_keys=256, prefill_rows=256, num_bufs=3)
CASE = Case(
    num_tokens=256,
    num_seqs=8,
    num_heads=4,
    num_kv_heads=1,
    width=128,
    page_size=16,
    max_pages=48,
    q_lens=(1, 1, 200, 3, 1),
    past_lens=(15, 400, 100, 600, 0),
    dtype="bfloat16",
    cache_dtype="bfloat16",
)


def test_lengths_decide_the_visits_alone() -> None:
    """Neither heads, dtypes and widths nor products and copies."""
    shapes = own.paged_shapes(**own.paged_sizes(CASE, num_pages=128))
    arrays = [jnp.zeros(s.shape, s.dtype) for s in shapes[:4]]
    target = Target(own.COUNTED.chip, pltpu.InterpretParams())
    run = own.paged_run(CASE.width, target, BLOCKS)
    whole = jax.jit(run, compiler_options=COMPILER_OPTIONS)
    found = visits.count(lambda: whole(*arrays, None, *own.addresses(CASE)))
    assert own.paged_counts(CASE, BLOCKS) == found
    assert min(found[x] for x in ("write_token", "decode_part", "prefill_quick")) > 0
