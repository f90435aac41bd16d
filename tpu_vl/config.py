"""Frozen configs: what the engine, the media pipeline and the server are told at start."""

from dataclasses import dataclass, field
from typing import Literal

from tpu_vl.errors import ConfigError

DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and limits of the engine: every compiled shape follows from these and the model.

    Args:
        dtype: of weights, activations and caches.
        tensor_parallel_size: devices on the "model" axis.
        max_model_len: prompt plus answer, in tokens.
        max_num_seqs: sequences with a slot at once.
        max_num_batched_tokens: tokens of one step, the largest token capacity.
        max_num_queued_reqs: requests waiting for a slot before new ones are refused with 503.
        page_size: tokens per KV page.
        num_pages: KV pages on the device.
        token_capacities: T of each text program, ascending.
        patch_capacities: P of each tower program, ascending; () in a text-only process.
        pool_rows: rows of the media pool; 0 in a text-only process.
        vision_step_patch_layers: patches times layers that a device may run in one tower slice; a
            frame of n patches counts as n * (1 + n / vision_attention_patches).
        vision_attention_patches: size of the frame whose attention takes as long as all else.
        row_block: patches per block of the tower's linear parts; divides every capacity.
        row_steps: of each patch capacity, the sizes that a call's last block may take, in even
            steps up to `row_block`; (): whole blocks only.
        modalities: what is served: () or a subset of ("image", "video").
    """

    dtype: DType
    tensor_parallel_size: int = 1
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int = 256
    page_size: int
    num_pages: int
    token_capacities: tuple[int, ...]
    patch_capacities: tuple[int, ...] = ()
    pool_rows: int = 0
    vision_step_patch_layers: int = 0
    vision_attention_patches: int = 4_096
    row_block: int = 0
    row_steps: tuple[int, ...] = ()
    modalities: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.token_capacities[-1] != self.max_num_batched_tokens:
            raise ConfigError(
                f"the largest token capacity {self.token_capacities[-1]} is not "
                f"--max-num-batched-tokens {self.max_num_batched_tokens}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs "
                f"{self.max_num_seqs}: a step could not hold one token of each sequence; raise the "
                "first or lower the second"
            )
        if self.num_pages * self.page_size < self.max_model_len:
            raise ConfigError(
                f"{self.num_pages} KV pages of {self.page_size} tokens hold less than "
                f"--max-model-len {self.max_model_len}; lower it or raise --kv-cache-memory-bytes"
            )
        if bool(self.modalities) != bool(self.patch_capacities and self.pool_rows):
            raise ConfigError(
                f"modalities {self.modalities} with patch capacities {self.patch_capacities} and "
                f"{self.pool_rows} pool rows: both or neither"
            )

    @property
    def max_pages_per_seq(self) -> int:
        """Width of the page table: pages of the longest sequence."""
        return -(-self.max_model_len // self.page_size)

    def steps_of(self, patch_capacity: int) -> int:
        """Sizes that the last block of a tower call of that capacity may take."""
        return self.row_steps[self.patch_capacities.index(patch_capacity)] if self.row_steps else 1

    def rows_of(self, token_capacity: int) -> int:
        """Sequences, and hidden rows, that a text program of that capacity holds."""
        return min(token_capacity, self.max_num_seqs)


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """What the front end accepts as media, checked before anything large is allocated.

    Args:
        max_images, max_videos: per request; 0 refuses the modality.
        max_bytes: of one encoded file.
        max_pixels: of one decoded picture or video frame (width * height), before resizing.
        max_video_frames: frames sampled from one video.
        max_decoded_frames: frames of a file that are read through while sampling.
        max_request_patches: patches of all media of a request.
        max_frame_patches: patches of one frame: the largest tower capacity.
        fetch_timeout_s: for one http(s) address, from connect to the last byte.
        allowed_local_media_path: folder that file:// addresses may read; None refuses them.
        allow_private_addresses: lets http(s) media come from private and loopback addresses.
    """

    max_images: int = 64
    max_videos: int = 4
    max_bytes: int = 64 << 20
    max_pixels: int = 100_000_000
    max_video_frames: int = 768
    max_decoded_frames: int = 100_000
    max_request_patches: int = 262_144
    max_frame_patches: int = 65_536
    fetch_timeout_s: float = 20.0
    allowed_local_media_path: str | None = None
    allow_private_addresses: bool = False


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """How pictures become patches: HF's preprocessor_config.json and the operator's overrides.

    Args:
        patch_size, temporal_patch_size, merge_size: the tower's geometry.
        image_min_pixels, image_max_pixels: smart-resize bounds of a picture (height * width).
        video_min_pixels, video_max_pixels: the same of a video (frames * height * width).
        video_fps: frames sampled per second of video.
        video_min_frames, video_max_frames: bounds of the number of sampled frames.
        mean, std: per channel, of pixels scaled to [0, 1]; applied on the device.
    """

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_min_pixels: int = 65_536
    image_max_pixels: int = 16_777_216
    video_min_pixels: int = 4_096
    video_max_pixels: int = 25_165_824
    video_fps: float = 2.0
    video_min_frames: int = 4
    video_max_frames: int = 768
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def factor(self) -> int:
        """Pixels per side of a merged cell: sizes are rounded to multiples of it."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens and what it answers to.

    Args:
        host, port: listening address.
        served_model_names: ids that requests may use; the first is reported.
        api_key: required as a bearer token when set.
        max_request_bytes: of a request body.
        num_preprocess_workers: threads that decode and resize media.
        preprocess_bytes: host memory that patches of unfinished requests may take.
        notice: text reported in /v1/models and at start (the bundled model's limits).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ("tpu-vl",)
    api_key: str | None = None
    max_request_bytes: int = 256 << 20
    num_preprocess_workers: int = 2
    preprocess_bytes: int = 4 << 30
    notice: str | None = None
    generation_defaults: dict[str, object] = field(default_factory=dict)
