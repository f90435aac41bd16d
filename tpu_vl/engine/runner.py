"""The only door to the device: a table of compiled programs, and the state that they hand on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tpu_vl.engine import layout
from tpu_vl.engine.batch import Batch
from tpu_vl.engine.sampling import SampleOutputs
from tpu_vl.engine.state import DeviceState
from tpu_vl.errors import MissingProgramError


@dataclass(frozen=True)
class PlacedCall:
    """A tower call's inputs on the device, shared by its slices."""

    num_patches: int
    patches_PW: jax.Array
    meta: jax.Array


class Runner:
    """Calls compiled programs and nothing else; every call returns before the device is done."""

    def __init__(
        self, table: Mapping[str, Any], params: Any, head: Any, state: DeviceState
    ) -> None:
        """Args:
        table: program name (see `layout`) -> compiled executable (`jax.stages.Compiled`).
        params: the model's params, with `text` and `vision`.
        head: `family.head(params)`.
        state: fresh device state; the runner owns it from here on.
        """
        self._table = table
        self._params = params
        self._head = head
        self._state = state

    def text(self, batch: Batch) -> jax.Array:
        """Runs the text program of a batch; returns its hidden_RD."""
        program = self._program(layout.text_name(batch.num_tokens))
        packed = jax.device_put(batch.text, _sharding(program, 2))
        hidden_RD, self._state = program(self._params.text, self._state, packed)
        return hidden_RD

    def sample(self, batch: Batch, hidden_RD: jax.Array) -> SampleOutputs:
        """Samples the rows of a batch whose text program gave `hidden_RD`."""
        program = self._program(layout.sample_name(batch.num_rows))
        packed = jax.device_put(batch.sample, _sharding(program, 3))
        outputs, self._state = program(self._head, self._state, hidden_RD, packed)
        outputs.token_R.copy_to_host_async()
        return outputs

    def place(self, patches_PW: np.ndarray, meta: np.ndarray) -> PlacedCall:
        """Sends a tower call's patches and metadata; each device gets its own patches only."""
        program = self._program(layout.encode_name(len(patches_PW)))
        return PlacedCall(
            len(patches_PW),
            jax.device_put(patches_PW, _sharding(program, 2)),
            jax.device_put(meta, _sharding(program, 3)),
        )

    def encode(self, call: PlacedCall, first_layer: int, end_layer: int) -> None:
        """Runs a range of tower layers over a placed call."""
        program = self._program(layout.encode_name(call.num_patches))
        layers = np.asarray([first_layer, end_layer], np.int32)
        self._state = program(
            self._params.vision,
            self._state,
            call.patches_PW,
            call.meta,
            jax.device_put(layers, _sharding(program, 4)),
        )

    def wait(self) -> None:
        """Blocks until everything that was called has run."""
        jax.block_until_ready(self._state.last_token_B)

    def _program(self, name: str) -> Any:
        program = self._table.get(name)
        if program is None:
            raise MissingProgramError(
                f"program {name!r} is not in the compiled table {sorted(self._table)}; "
                "precompile/programs.py must list every shape that the engine can ask for"
            )
        return program


def _sharding(program: Any, argument: int) -> Any:
    """Where the compiled program wants a (single-array) argument."""
    return program.input_shardings[0][argument]
