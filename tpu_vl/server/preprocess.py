"""Files of a request to patches, in a bounded pool of threads and of host memory."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tpu_vl.chat.expand import MediaTokens
from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.errors import MediaTooLargeError
from tpu_vl.server.budget import ByteBudget, Reservation
from tpu_vl.server.media import gather_or_cancel
from tpu_vl.types import MediaPart
from tpu_vl.vision.decode import open_image
from tpu_vl.vision.options import ImageOptions
from tpu_vl.vision.process import process_image, process_video
from tpu_vl.vision.resize import plan_image
from tpu_vl.vision.video import timestamp_text


@dataclass(frozen=True, kw_only=True)
class ReadyMedia:
    """One image or video as the prompt and the engine need it.

    Args:
        tokens: how it expands in the prompt.
        grid_thw: temporal groups and patch grid.
        patches: uint8 bytes of the patches.
        digest: 32 bytes.
    """

    tokens: MediaTokens
    grid_thw: tuple[int, int, int]
    patches: bytes
    digest: bytes


class Preprocessor:
    """Decodes, resizes and cuts media; at most so many at once, in so many bytes.

    Sizes of pictures are read from their headers first, so a request that is too large is refused
    before anything is decoded, and the bytes of its patches are reserved before they exist.

    Args:
        config: how pictures become patches.
        limits: what is accepted.
        num_workers: threads.
        limit_bytes: host memory of the patches of all unfinished requests.
    """

    def __init__(
        self, config: ProcessorConfig, limits: MediaLimits, num_workers: int, limit_bytes: int
    ) -> None:
        self._config = config
        self._limits = limits
        self.budget = ByteBudget(limit_bytes)
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="preprocess")

    def close(self) -> None:
        """Ends the threads; what has not begun is dropped."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def run(
        self, parts: Sequence[MediaPart], files: Sequence[list[bytes]]
    ) -> tuple[list[ReadyMedia], Reservation]:
        """Makes the patches of one request.

        Args:
            parts: in prompt order.
            files: of each part.

        Returns:
            The media in prompt order and the bytes they hold; the caller closes the reservation.

        Raises:
            MediaError: a medium or an option is refused.
            MediaTooLargeError: the media of the request are over `max_request_patches`.
        """
        sizes = await self._pool(
            [(self._plan, part, data) for part, data in zip(parts, files, strict=True)]
        )
        known = sum(size for size in sizes if size is not None)
        self._check_total(known)
        open_ended = sizes.count(None) * -(-self._config.video_max_pixels // self._patch_area)
        most = min(known + open_ended, self._limits.max_request_patches)
        reservation = await self.budget.reserve(most * self._patch_bytes)
        jobs = [
            self._workers.submit(self._process, part, data)
            for part, data in zip(parts, files, strict=True)
        ]
        try:
            media = await gather_or_cancel(asyncio.wrap_future(job) for job in jobs)
            total = sum(len(item.patches) for item in media)
            self._check_total(total // self._patch_bytes)
        except BaseException:
            _close_when_done(reservation, jobs)
            raise
        reservation.shrink(total)
        return media, reservation

    async def _pool(self, calls: Sequence[tuple]) -> list:
        jobs = [self._workers.submit(*call) for call in calls]
        return await gather_or_cancel(asyncio.wrap_future(job) for job in jobs)

    @property
    def _patch_area(self) -> int:
        return self._config.patch_size**2

    @property
    def _patch_bytes(self) -> int:
        return 3 * self._config.temporal_patch_size * self._patch_area

    def _plan(self, part: MediaPart, files: list[bytes]) -> int | None:
        """Patches of a picture, from its header; None for a video, known only when sampled."""
        if part.kind == "video":
            return None
        options = ImageOptions.parse(part.options, self._config, param=part.param)
        image = open_image(files[0], self._limits, param=part.param)
        plan = plan_image(
            image.height, image.width, self._config, self._limits, options, param=part.param
        )
        return plan.num_patches

    def _process(self, part: MediaPart, files: list[bytes]) -> ReadyMedia:
        config, limits, options = self._config, self._limits, part.options
        if part.kind == "image":
            media = process_image(files[0], config, limits, options, param=part.param)
        else:
            source = files[0] if len(files) == 1 else files
            media = process_video(source, config, limits, options, param=part.param)
        return ReadyMedia(
            tokens=MediaTokens(
                kind=part.kind,
                num_frames=media.grid_thw[0],
                tokens_per_frame=media.tokens_per_frame,
                frame_texts=tuple(map(timestamp_text, media.timestamps_s)),
            ),
            grid_thw=media.grid_thw,
            patches=media.patches_PW.tobytes(),
            digest=media.digest,
        )

    def _check_total(self, num_patches: int) -> None:
        limit = self._limits.max_request_patches
        if num_patches > limit:
            merged = self._config.merge_size**2
            raise MediaTooLargeError(
                f"the media of the request take {num_patches // merged} tokens, the limit is "
                f"{limit // merged}: send fewer or smaller ones, set max_pixels, or raise "
                "--max-request-patches",
                param="messages",
            )


def _close_when_done(reservation: Reservation, jobs: Sequence[Future]) -> None:
    """Gives the bytes back once no thread works for the request: none can be stopped."""
    running = [asyncio.wrap_future(job) for job in jobs if not job.cancel() and not job.done()]
    if not running:
        reservation.close()
        return
    ended = asyncio.gather(*running, return_exceptions=True)
    ended.add_done_callback(lambda _: reservation.close())
