"""A video file through PyAV: its frames counted and timed first, then decoded where wanted."""

import io
from collections.abc import Iterator
from types import TracebackType

import av
import numpy as np
from av.error import FFmpegError
from av.stream import Disposition

from tpu_vl.config import MediaLimits
from tpu_vl.errors import MediaTooLargeError
from tpu_vl.vision.decode import orient, over_white
from tpu_vl.vision.sniff import media_error, missing_bytes, video_container

_DECODER_THREADS = 4
_FALLBACK_FPS = 24.0
_VP8_SHOW_FRAME = 0x10


class VideoFile:
    """An opened video file; a context manager.

    Attributes:
        fps: frames per second; of a file of variable rate the mean.
        times_s: float64 time of every frame in display order, from 0: index / fps where the rate
            is constant, else the presentation times.
    """

    def __init__(self, data: bytes, limits: MediaLimits, *, param: str) -> None:
        """Reads the file's headers and packets; decodes nothing.

        Args:
            data: an MP4, MOV, WebM, MKV, AVI or GIF file.
            limits: `max_pixels` of a frame and `max_decoded_frames` apply.
            param: path of the part in the request.

        Raises:
            MediaError: not such a file, no video stream, no frames, or cut off.
            MediaTooLargeError: over a limit.
        """
        self._param, self._limits = param, limits
        name = video_container(data, param=param)
        if missing := missing_bytes(data, name):
            raise media_error(
                param, f"the video is truncated: at least {missing} bytes are missing"
            )
        try:
            self._container = av.open(io.BytesIO(data), "r", format=name)
        except (FFmpegError, ValueError):
            raise media_error(param, "the video is damaged or truncated") from None
        try:
            self._stream = self._pick_stream()
            self._packets = self._read_packets()
            shown = [packet for packet in self._packets if self._is_shown(packet)]
            if not shown:
                raise media_error(param, "the video has no frames")
            stamps = [packet.pts for packet in shown if packet.pts is not None]
            # AVI stores no presentation times: its frames are known by their order alone.
            self._by_order = name == "avi" or len(stamps) < len(shown)
            self._stamps = sorted(stamps)
            self.fps, self.times_s = self._timing(shown)
        except BaseException:
            self._container.close()
            raise

    def __enter__(self) -> "VideoFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._container.close()

    def frames(self, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Decodes up to the last wanted frame; gives the wanted ones that can be decoded.

        Args:
            indices: int64 frame numbers, ascending.

        Returns:
            Pairs of a frame number and an upright uint8 RGB picture [height, width, 3].

        Raises:
            MediaTooLargeError: a frame is over `max_pixels`.
        """
        wanted = set(indices.tolist())
        last = max(wanted)
        for index, frame in self._decode(min(wanted)):
            if index in wanted:
                yield index, self._rgb(frame)
            if index >= last:
                return

    def _pick_stream(self) -> av.VideoStream:
        streams = [
            stream
            for stream in self._container.streams.video
            if not stream.disposition & Disposition.attached_pic
        ]
        if not streams:
            audio = " (audio only)" if self._container.streams.audio else ""
            raise media_error(self._param, f"the file has no video stream{audio}")
        stream = streams[0]
        context = stream.codec_context
        if context is None:
            raise media_error(self._param, "the video's codec is not supported")
        self._check_size(context.height, context.width)
        # A stream may declare a larger picture than its container does.
        context.options = {"max_pixels": str(self._limits.max_pixels)}
        context.thread_type = "AUTO"
        context.thread_count = _DECODER_THREADS
        return stream

    def _read_packets(self) -> list[av.Packet]:
        packets: list[av.Packet] = []
        limit = self._limits.max_decoded_frames
        try:
            for packet in self._container.demux(self._stream):
                if packet.size:
                    packets.append(packet)
                if len(packets) > limit:
                    raise MediaTooLargeError(
                        f"{self._param}: the video has more than {limit} frames, the limit; cut it",
                        param=self._param,
                    )
        except (FFmpegError, ValueError):
            raise media_error(self._param, "the video is damaged or truncated") from None
        return packets

    def _is_shown(self, packet: av.Packet) -> bool:
        if packet.is_discard:  # outside the file's edit list
            return False
        return self._stream.codec_context.name != "vp8" or bool(bytes(packet)[0] & _VP8_SHOW_FRAME)

    def _timing(self, shown: list[av.Packet]) -> tuple[float, np.ndarray]:
        """Rate and times; the stated rate counts where every frame is within half a frame of it."""
        number = np.arange(len(shown), dtype=np.float64)
        rates = [float(r) for r in (self._stream.average_rate, self._stream.guessed_rate) if r]
        if self._by_order or len(shown) == 1 or self._stamps[0] == self._stamps[-1]:
            fps = rates[0] if rates else _FALLBACK_FPS
            return fps, number / fps
        tick_s = float(self._stream.time_base or 1)
        times_s = (np.array(self._stamps, np.float64) - self._stamps[0]) * tick_s
        for fps in rates:
            if np.all(np.abs(times_s * fps - number) <= 0.5):
                return fps, number / fps
        final = max(shown, key=lambda packet: packet.pts or 0)
        shortest_s = times_s[-1] / (len(shown) - 1)
        duration_s = times_s[-1] + ((final.duration or 0) * tick_s or shortest_s)
        return len(shown) / float(duration_s), times_s

    def _decode(self, first: int) -> Iterator[tuple[int, av.VideoFrame]]:
        """All frames from number `first` or somewhat before it, in display order."""
        order = 0
        for packet in (*self._packets[self._entry(first) :], None):
            try:
                frames = self._stream.codec_context.decode(packet)
            except (FFmpegError, ValueError):  # ValueError: a codec that became unknown
                order += 1
                continue
            for frame in frames:
                index = order if self._by_order else self._number(frame.pts)
                order += 1
                if index is not None:
                    yield index, frame

    def _entry(self, first: int) -> int:
        """The last key frame shown no later than frame `first`: decoding starts there."""
        if self._by_order:
            return 0
        stamp = self._stamps[first]
        entries = [
            position
            for position, packet in enumerate(self._packets)
            if packet.is_keyframe and packet.pts is not None and packet.pts <= stamp
        ]
        return entries[-1] if entries else 0

    def _number(self, pts: int | None) -> int | None:
        if pts is None:
            return None
        index = int(np.searchsorted(self._stamps, pts))
        return index if index < len(self._stamps) and self._stamps[index] == pts else None

    def _rgb(self, frame: av.VideoFrame) -> np.ndarray:
        self._check_size(frame.height, frame.width)
        if any(component.is_alpha for component in frame.format.components):
            rgb = over_white(frame.to_ndarray(format="rgba"))
        else:
            rgb = frame.to_ndarray(format="rgb24")
        matrix = frame.side_data.get("DISPLAYMATRIX")
        if matrix is None:
            return rgb
        a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].tolist()
        if abs(b) > abs(a):  # shown at (c * row, b * column)
            return orient(rgb, True, c < 0, b < 0)
        return orient(rgb, False, a < 0, d < 0)

    def _check_size(self, height: int, width: int) -> None:
        limit = self._limits.max_pixels
        if height * width > limit:
            raise MediaTooLargeError(
                f"{self._param}: the video has frames of {width} x {height} pixels, over the limit "
                f"of {limit} pixels; send a smaller one",
                param=self._param,
            )
