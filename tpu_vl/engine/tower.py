"""The queue of frames to encode, and the one packed tower call that is being worked off."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from tpu_vl.config import EngineConfig
from tpu_vl.engine.media_cache import FrameKey, MediaCache
from tpu_vl.engine.sequence import Frame
from tpu_vl.errors import IntegrityError
from tpu_vl.vision.pack import FramePlan, PackedCall, computed_rows, layer_cost, pack_frames

TOWER = "tower"
"""Owner of the frames of the call in progress: it ends even if every request for it is gone."""


@dataclass(eq=False)
class TowerCall:
    """A packed call on its way through the tower's layers.

    Args:
        packed: frames and capacity.
        patches: uint8 [h * w, W] of each frame.
        rows: int32 pool rows of each frame.
        layer_cost: of one layer, in patches of linear work of the busiest device.
        next_layer: the first layer that has not been dispatched.
    """

    packed: PackedCall
    patches: list[np.ndarray]
    rows: list[np.ndarray]
    layer_cost: float
    next_layer: int = 0


@dataclass(frozen=True)
class TowerSlice:
    """A range of layers of a call, to be dispatched in this step."""

    call: TowerCall
    first_layer: int
    end_layer: int


class Tower:
    """Plans tower work: first come, first encoded, a bounded amount per step."""

    def __init__(
        self,
        cache: MediaCache,
        *,
        engine_config: EngineConfig,
        depth: int,
        num_bins: int,
    ) -> None:
        """Args:
        cache: told when a frame's rows are written.
        engine_config: capacities, blocks and the work of one step; at least one layer runs.
        depth: tower layers.
        num_bins: of a call.
        """
        self._cache = cache
        self._config = engine_config
        self._depth = depth
        self._num_bins = num_bins
        self._queue: OrderedDict[FrameKey, Frame] = OrderedDict()
        self._call: TowerCall | None = None
        self.num_calls = 0
        self.num_frames = 0
        self.num_patches = 0
        self.num_padding_patches = 0

    @property
    def busy(self) -> bool:
        """Frames wait or a call is in progress."""
        return bool(self._queue) or self._call is not None

    def want(self, frame: Frame) -> None:
        """Queues a frame whose rows are reserved and not written, once."""
        in_call = self._call is not None and any(
            plan.key == frame.key for plan in self._call.packed.frames
        )
        if not in_call:
            self._queue.setdefault(frame.key, frame)

    def forget(self, key: FrameKey) -> None:
        """Takes a frame that nobody needs any more out of the queue."""
        self._queue.pop(key, None)

    def advance(self) -> list[TowerSlice]:
        """Plans this step's slices; frames of finished calls are marked ready."""
        slices: list[TowerSlice] = []
        budget = self._config.vision_step_patch_layers
        while self._call is not None or self._queue:
            call = self._call = self._call or self._next_call()
            num_layers = int(budget // call.layer_cost)
            if not slices:
                num_layers = max(1, num_layers)
            if num_layers == 0:
                break
            end = min(self._depth, call.next_layer + num_layers)
            slices.append(TowerSlice(call, call.next_layer, end))
            budget -= (end - call.next_layer) * call.layer_cost
            call.next_layer = end
            if end < self._depth:
                break
            self._finish(call)
        return slices

    def _next_call(self) -> TowerCall:
        plans = [
            FramePlan(key=f.key, grid_h=f.grid_hw[0], grid_w=f.grid_hw[1])
            for f in self._queue.values()
        ]
        packed = pack_frames(plans, self._config.patch_capacities, self._num_bins)[0]
        frames = [self._queue.popitem(last=False)[1] for _ in packed.frames]
        rows = []
        for frame in frames:
            entry = self._cache.pin(frame.key, frame.num_tokens, TOWER)
            if entry is None:
                raise IntegrityError(f"frame {frame.key[1]} is queued without pool rows")
            rows.append(entry.rows_M)
        self.num_calls += 1
        self.num_frames += len(frames)
        self.num_patches += packed.num_patches
        steps = self._config.steps_of(packed.capacity)
        computed = computed_rows(packed, self._config.row_block, steps)
        self.num_padding_patches += computed - packed.num_patches
        return TowerCall(
            packed,
            [f.patches_PW for f in frames],
            rows,
            layer_cost=layer_cost(packed, self._config.vision_attention_patches),
        )

    def _finish(self, call: TowerCall) -> None:
        for plan in call.packed.frames:
            self._cache.mark_ready(plan.key)  # pyright: ignore[reportArgumentType]
            self._cache.unpin(plan.key, TOWER)  # pyright: ignore[reportArgumentType]
        self._call = None

    def check_integrity(self) -> None:
        """Checks that every frame to be encoded has rows that nobody has written.

        Raises:
            IntegrityError: a queued frame lost its rows, or is encoded twice.
        """
        in_call = [plan.key for plan in self._call.packed.frames] if self._call else []
        for key in [*self._queue, *in_call]:
            entry = self._cache.entry(key)  # pyright: ignore[reportArgumentType]
            if entry is None or entry.ready or not entry.owners:
                raise IntegrityError(f"frame {key!r} is to be encoded, but its entry is {entry}")
        if set(in_call) & set(self._queue):
            raise IntegrityError("a frame of the running tower call is queued again")
