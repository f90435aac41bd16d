"""The one list of programs: what runs on the device, with which shapes, shardings and donations.

Runner, warm-up, plan and tests read this list; nothing else may run on the device once requests
are served. A program's name is the key under which the runner calls it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_vl.config import EngineConfig
from tpu_vl.engine import layout, steps
from tpu_vl.engine.state import abstract_state, zeros
from tpu_vl.kernels.paged_attention import api as paged_attention
from tpu_vl.kernels.vision_attention import api as vision_attention
from tpu_vl.mesh import MODEL, platform
from tpu_vl.models.family import Backend, Family, placed_params
from tpu_vl.precompile import compiler_options

ZEROS = "zeros"
"""Name of the program that makes the first device state."""


@dataclass(frozen=True)
class Program:
    """One executable that will exist.

    Args:
        name: key in the table.
        function: pure; everything static is bound already.
        arguments: abstract trees with shardings, in order.
        outputs: abstract tree with shardings of the result.
        donate: indices of arguments whose buffers the result takes over.
        mesh: where it runs.
        compiler_options: beyond the compiler's defaults.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    outputs: Any
    donate: tuple[int, ...]
    mesh: Mesh
    compiler_options: Mapping[str, str] = field(default_factory=dict)


def make_backend(mesh: Mesh, engine_config: EngineConfig) -> Backend:
    """The implementation of each op that the mesh's platform runs."""
    return Backend(
        mesh=mesh,
        vision_attention=vision_attention.pick(platform(mesh)),
        paged_attention=paged_attention.pick(platform(mesh)),
        row_block=engine_config.row_block,
    )


def programs(
    family: Family, cfg: Any, engine_config: EngineConfig, backend: Backend
) -> tuple[Program, ...]:
    """Every program of one process, in the order in which a request meets them.

    Args:
        family: the model's record.
        cfg: its config; `cfg.vision` None leaves the tower's programs out.
        engine_config: sizes.
        backend: implementations and mesh.

    Returns:
        `zeros`, then `encode/{P}` per patch capacity, `text/{T}` per token capacity and
        `sample/{R}` per row capacity.
    """
    lister = _Lister(family, cfg, engine_config, backend)
    listed = [lister.zeros()]
    listed += [lister.encode(p) for p in engine_config.patch_capacities]
    listed += [lister.text(t) for t in engine_config.token_capacities]
    listed += [lister.sample(r) for r in layout.sample_capacities(engine_config)]
    return tuple(listed)


class _Lister:
    """Holds what all programs of a process share: statics, params and state."""

    def __init__(
        self, family: Family, cfg: Any, engine_config: EngineConfig, backend: Backend
    ) -> None:
        self.engine_config = engine_config
        self.mesh = backend.mesh
        self.family, self.cfg = family, cfg
        self.backend = backend
        self.statics: Mapping[str, Any] = {"family": family, "cfg": cfg, "backend": backend}
        self.params = placed_params(family, cfg, engine_config.dtype, backend.mesh)
        self.state = abstract_state(family, cfg, engine_config, backend)

    def _array(self, shape: tuple[int, ...], dtype: Any, *names: str | None) -> Any:
        sharding = NamedSharding(self.mesh, PartitionSpec(*names))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    def _hidden(self, num_rows: int) -> Any:
        return self._array((num_rows, self.family.text_width(self.cfg)), self.engine_config.dtype)

    def zeros(self) -> Program:
        return Program(ZEROS, partial(zeros, self.state), (), self.state, (), self.mesh)

    def text(self, num_tokens: int) -> Program:
        size = layout.text_layout(self.engine_config, num_tokens).size
        return Program(
            name=layout.text_name(num_tokens),
            function=partial(
                steps.text_program,
                engine_config=self.engine_config,
                num_tokens=num_tokens,
                **self.statics,
            ),
            arguments=(self.params.text, self.state, self._array((size,), jnp.int32)),
            outputs=(self._hidden(self.engine_config.rows_of(num_tokens)), self.state),
            donate=(1,),
            mesh=self.mesh,
            compiler_options=compiler_options.of_text(self.mesh, num_tokens),
        )

    def sample(self, num_rows: int) -> Program:
        size = layout.sample_layout(self.engine_config, num_rows).size
        function = partial(
            steps.sample_program,
            engine_config=self.engine_config,
            num_rows=num_rows,
            **self.statics,
        )
        arguments = (
            self.family.head(self.params),
            self.state,
            self._hidden(num_rows),
            self._array((size,), jnp.int32),
        )
        tokens, _ = jax.eval_shape(function, *arguments)
        tokens = jax.tree.map(lambda a: self._array(a.shape, a.dtype), tokens)
        return Program(
            name=layout.sample_name(num_rows),
            function=function,
            arguments=arguments,
            outputs=(tokens, self.state),
            donate=(1,),
            mesh=self.mesh,
        )

    def encode(self, num_patches: int) -> Program:
        geometry = self.family.geometry(self.cfg)
        size = layout.encode_layout(geometry, num_patches).size
        backend = replace(self.backend, row_steps=self.engine_config.steps_of(num_patches))
        statics = {**self.statics, "backend": backend}
        return Program(
            name=layout.encode_name(num_patches),
            function=partial(steps.encode_program, num_patches=num_patches, **statics),
            arguments=(
                self.params.vision,
                self.state,
                self._array((num_patches, geometry.patch_width), jnp.uint8, MODEL, None),
                self._array((size,), jnp.int32),
                self._array((2,), jnp.int32),
            ),
            outputs=self.state,
            donate=(1,),
            mesh=self.mesh,
        )
