"""The host record of one request: its tokens, frames, and what it holds."""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from tpu_vl.config import EngineConfig
from tpu_vl.engine.layout import BIAS_CAPACITY, MAX_LOGPROBS, STOP_CAPACITY
from tpu_vl.engine.media_cache import FrameKey
from tpu_vl.engine.messages import AddRequest, Media, Sampling
from tpu_vl.errors import ContextLengthError, MediaError, MediaTooLargeError, RequestError
from tpu_vl.models.family import VisionGeometry


@dataclass(frozen=True)
class Frame:
    """One frame of a medium, as the prompt holds it.

    Args:
        key: what it shows.
        start: index of its first placeholder token.
        num_tokens: merged cells: tokens, and pool rows.
        grid_hw: patches per side.
        patches_PW: uint8, a view of the request's own bytes.
    """

    key: FrameKey
    start: int
    num_tokens: int
    grid_hw: tuple[int, int]
    patches_PW: np.ndarray

    @property
    def end(self) -> int:
        """One past its last placeholder token."""
        return self.start + self.num_tokens

    @property
    def num_patches(self) -> int:
        """Patches that the tower reads."""
        return self.grid_hw[0] * self.grid_hw[1]


@dataclass(eq=False)
class Sequence:
    """A request on its way through the engine.

    Args:
        request_id: as the client named it.
        arrival: order of arrival: smaller came first.
        prompt_T: int32 token ids.
        positions_XT: int32 positions of the prompt, X = 3 or 1.
        position_delta: position of a token behind the prompt minus its index.
        sampling: row parameters, `max_tokens` cut to the context.
        frames: in prompt order.
        answer: tokens read so far.
        num_pending: tokens sampled on the device but not read yet: at most 1 between steps.
        num_computed: tokens whose K and V are in the cache once dispatched work has run.
        slot: of the device state; None while waiting.
        pages: KV pages in order.
        num_pages_sent: pages that the device's table holds.
        num_restored: tokens that it had when it got its slot: a restart has some of its answer.
        fresh: no batch has reset the slot yet.
        finished: ended; tokens still in flight are dropped.
    """

    request_id: str
    arrival: int
    prompt_T: np.ndarray
    positions_XT: np.ndarray
    position_delta: int
    sampling: Sampling
    frames: tuple[Frame, ...]
    answer: list[int] = field(default_factory=list)
    num_pending: int = 0
    num_computed: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_pages_sent: int = 0
    num_restored: int = 0
    fresh: bool = True
    finished: bool = False

    @property
    def num_answers(self) -> int:
        """Answer tokens, the one in flight included."""
        return len(self.answer) + self.num_pending

    @property
    def length(self) -> int:
        """Prompt and answer tokens, the one in flight included."""
        return self.prompt_T.size + self.num_answers

    @property
    def decodes(self) -> bool:
        """Only its newest answer token is left to compute."""
        return self.num_answers > 0 and self.num_computed == self.length - 1

    @property
    def complete(self) -> bool:
        """Its last token has been sampled; there is nothing left to compute."""
        return self.num_answers >= self.sampling.max_tokens

    @property
    def counted(self) -> bool:
        """A penalty is on, so its slot counts tokens."""
        s = self.sampling
        return (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (1, 0, 0)

    def frames_within(self, start: int, end: int) -> list[Frame]:
        """Frames with a token in [start, end)."""
        first = bisect_right(self.frames, start, key=lambda frame: frame.end)
        return list(takewhile(lambda frame: frame.start < end, self.frames[first:]))


def make_sequence(
    message: AddRequest,
    arrival: int,
    *,
    engine_config: EngineConfig,
    geometry: VisionGeometry | None,
    vocab_size: int,
) -> Sequence:
    """Checks a request against the engine's limits and makes its record.

    The front end refuses such requests with better messages; this keeps the loop safe from any.

    Args:
        message: the request.
        arrival: its place in the order.
        engine_config: limits.
        geometry: of the tower; None in a text-only process.
        vocab_size: ids are below it.

    Raises:
        RequestError: the request cannot be served; the message says why.
    """
    prompt_T = np.frombuffer(message.token_ids, np.int32)
    limit = engine_config.max_model_len
    if prompt_T.size == 0:
        raise RequestError("the prompt has no tokens; send at least one")
    if prompt_T.size >= limit:
        raise ContextLengthError(
            f"the prompt has {prompt_T.size} tokens, but --max-model-len {limit} leaves room for "
            f"{limit - 1} and one answer token; shorten the prompt or use smaller media"
        )
    if prompt_T.min() < 0 or prompt_T.max() >= vocab_size:
        raise RequestError(f"the prompt holds token ids outside 0 to {vocab_size - 1}")
    if geometry is None and (message.media or message.positions):
        raise MediaError("this server takes text only; restart it without --text-model-only")
    room = limit - prompt_T.size
    sampling = message.sampling
    return Sequence(
        request_id=message.request_id,
        arrival=arrival,
        prompt_T=prompt_T,
        positions_XT=_positions(message, prompt_T.size, 3 if geometry else 1),
        position_delta=message.position_delta,
        sampling=_checked(sampling, room),
        frames=_frames(message, prompt_T, geometry, engine_config) if geometry else (),
    )


def _positions(message: AddRequest, num_tokens: int, num_axes: int) -> np.ndarray:
    if not message.positions:
        return np.broadcast_to(np.arange(num_tokens, dtype=np.int32), (num_axes, num_tokens))
    positions = np.frombuffer(message.positions, np.int32)
    if positions.size != num_axes * num_tokens:
        raise RequestError(
            f"{positions.size} positions for {num_tokens} prompt tokens; send {num_axes} each"
        )
    return positions.reshape(num_axes, num_tokens)


def _checked(sampling: Sampling, room: int) -> Sampling:
    """The parameters with `max_tokens` cut to the context's room."""
    if sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {sampling.max_tokens}; it must be at least 1")
    if len(sampling.logit_bias) > BIAS_CAPACITY:
        raise RequestError(
            f"logit_bias has {len(sampling.logit_bias)} entries; at most {BIAS_CAPACITY} are taken"
        )
    if sampling.min_tokens and len(sampling.stop_token_ids) > STOP_CAPACITY:
        raise RequestError(
            f"min_tokens with {len(sampling.stop_token_ids)} stop token ids; at most "
            f"{STOP_CAPACITY} can be held back"
        )
    if sampling.num_logprobs > MAX_LOGPROBS:
        raise RequestError(
            f"{sampling.num_logprobs} alternatives per token asked for; at most {MAX_LOGPROBS}"
        )
    if not 0 < sampling.top_p <= 1 or sampling.temperature < 0 or sampling.repetition_penalty <= 0:
        raise RequestError(
            f"top_p {sampling.top_p} must be in (0, 1], temperature {sampling.temperature} at "
            f"least 0, repetition_penalty {sampling.repetition_penalty} above 0"
        )
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return Sampling(**{**fields, "max_tokens": min(sampling.max_tokens, room)})


def _frames(
    message: AddRequest,
    prompt_T: np.ndarray,
    geometry: VisionGeometry,
    engine_config: EngineConfig,
) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    for medium in message.media:
        _check_medium(medium, geometry, engine_config)
        _, h, w = medium.grid_thw
        per_frame, num_tokens = h * w, h * w // geometry.merge_size**2
        wanted = geometry.image_token_id if medium.kind == "image" else geometry.video_token_id
        patches_PW = medium.patches_PW()
        for i, start in enumerate(medium.starts):
            span_T = prompt_T[max(start, 0) : start + num_tokens]
            behind = frames[-1].end if frames else 0
            if start < behind or span_T.size != num_tokens or (span_T != wanted).any():
                raise MediaError(
                    f"{medium.kind} frame {i} at prompt index {start} does not cover {num_tokens} "
                    "placeholder tokens of its own, in prompt order"
                )
            frames.append(
                Frame(
                    key=(medium.digest, i),
                    start=start,
                    num_tokens=num_tokens,
                    grid_hw=(h, w),
                    patches_PW=patches_PW[i * per_frame : (i + 1) * per_frame],
                )
            )
    placeholders = np.isin(prompt_T, (geometry.image_token_id, geometry.video_token_id)).sum()
    if placeholders != sum(f.num_tokens for f in frames):
        raise MediaError(
            f"the prompt has {placeholders} placeholder tokens, its media fill "
            f"{sum(f.num_tokens for f in frames)}"
        )
    return tuple(frames)


def _check_medium(medium: Media, geometry: VisionGeometry, engine_config: EngineConfig) -> None:
    t, h, w = medium.grid_thw
    if min(t, h, w) < 1 or h % geometry.merge_size or w % geometry.merge_size:
        raise MediaError(
            f"{medium.kind} grid {medium.grid_thw} has sides that are no multiples of "
            f"{geometry.merge_size} patches"
        )
    if len(medium.starts) != t or len(medium.patches) != t * h * w * geometry.patch_width:
        raise MediaError(
            f"{medium.kind} grid {medium.grid_thw} comes with {len(medium.starts)} spans and "
            f"{len(medium.patches)} bytes of patches"
        )
    rows = h * w // geometry.merge_size**2
    largest = engine_config.patch_capacities[-1] // geometry.num_bins
    if h * w > largest or rows > engine_config.pool_rows:
        raise MediaTooLargeError(
            f"a {medium.kind} frame of {h * w} patches ({rows} tokens) is over the largest tower "
            f"capacity of {largest} patches or the media pool of "
            f"{engine_config.pool_rows} rows; send it smaller"
        )
