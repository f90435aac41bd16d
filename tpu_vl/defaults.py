"""Limits that fit a platform, and the engine config that follows from flags, model and machine."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from tpu_vl import mesh as meshes
from tpu_vl import tree
from tpu_vl.config import DType, EngineConfig, MediaLimits, ProcessorConfig
from tpu_vl.errors import ConfigError
from tpu_vl.flags import ServeFlags
from tpu_vl.kernels.paged_attention.api import cache_dtype
from tpu_vl.models.family import Family
from tpu_vl.precompile import buckets


@dataclass(frozen=True, kw_only=True)
class PlatformDefaults:
    """What a flag that is not given becomes on one platform.

    Args:
        kv_bytes: KV memory of a platform that does not report its own; None: it reports.
        vision_step_patch_layers: patches times layers of one tower slice between decode steps.
        The other fields are those of `EngineConfig` and `MediaLimits`.
    """

    dtype: DType
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    max_frame_patches: int
    row_block: int
    kv_bytes: int | None
    vision_step_patch_layers: int


PLATFORMS: Mapping[str, PlatformDefaults] = {
    "tpu": PlatformDefaults(
        dtype="bfloat16",
        max_model_len=32_768,
        max_num_seqs=256,
        max_num_batched_tokens=2_048,
        page_size=64,
        max_frame_patches=65_536,
        row_block=1_024,
        kv_bytes=None,
        vision_step_patch_layers=16_384 * 27,
    ),
    "gpu": PlatformDefaults(
        dtype="bfloat16",
        max_model_len=16_384,
        max_num_seqs=64,
        max_num_batched_tokens=1_024,
        page_size=32,
        max_frame_patches=16_384,
        row_block=1_024,
        kv_bytes=None,
        vision_step_patch_layers=16_384 * 27,
    ),
    "cpu": PlatformDefaults(
        dtype="float32",
        max_model_len=4_096,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        page_size=16,
        max_frame_patches=4_096,
        row_block=256,
        kv_bytes=512 << 20,
        vision_step_patch_layers=4_096 * 8,
    ),
}

# Device memory that executables, their temporaries and the runtime take beside the counted arrays.
_RESERVE_BYTES = 2 << 30


def dtype_of(flags: ServeFlags, platform: str) -> DType:
    """The dtype that `--dtype` asks for on this platform."""
    if flags.dtype == "auto":
        return PLATFORMS[platform].dtype
    return "float32" if flags.dtype == "float32" else "bfloat16"


def media_limits(flags: ServeFlags, max_frame_patches: int) -> MediaLimits:
    """What the front end accepts as media.

    Args:
        flags: the operator's limits.
        max_frame_patches: the largest tower capacity; 0 in a text-only process.

    Raises:
        ConfigError: `--limit-mm-per-prompt` is none that can be kept.
    """
    base = MediaLimits()
    given = _prompt_limits(flags)
    return MediaLimits(
        max_images=given["image"].get("count", base.max_images),
        max_videos=given["video"].get("count", base.max_videos),
        max_video_frames=given["video"].get("num_frames", base.max_video_frames),
        max_bytes=flags.max_media_mb << 20,
        max_request_patches=flags.max_request_patches or base.max_request_patches,
        max_frame_patches=max_frame_patches,
        fetch_timeout_s=flags.media_fetch_timeout_s,
        allowed_local_media_path=flags.allowed_local_media_path,
        allow_private_addresses=flags.allow_private_media_addresses,
    )


def _prompt_limits(flags: ServeFlags) -> dict[str, dict[str, int]]:
    """`--limit-mm-per-prompt` as {modality: {"count": ..., "num_frames": ...}}, keys as given."""
    known = {"image": {"count"}, "video": {"count", "num_frames"}}
    limits: dict[str, dict[str, int]] = {"image": {}, "video": {}}
    try:
        given = json.loads(flags.limit_mm_per_prompt or "{}")
        for modality, value in given.items():
            limits[modality] = value if isinstance(value, dict) else {"count": value}
            numbers = [type(n) is int and n >= 0 for n in limits[modality].values()]
            if not all(numbers) or set(limits[modality]) - known[modality]:
                raise ValueError(modality)
    except (ValueError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"--limit-mm-per-prompt {flags.limit_mm_per_prompt!r} must be JSON with the keys image "
            "and video and counts >= 0, for videos also frames, such as "
            '{"image": 8, "video": {"count": 1, "num_frames": 64}}'
        ) from error
    return limits


def fit_processor(
    processor: ProcessorConfig, flags: ServeFlags, limits: MediaLimits
) -> ProcessorConfig:
    """The processor bounds under the operator's token flags and the largest tower capacity.

    A picture is scaled down to what one frame may hold, and a video's budget is cut to what a clip
    of one temporal group may hold, so that smaller limits shrink media instead of refusing them.
    """
    cell = processor.factor**2
    frame_pixels = limits.max_frame_patches * processor.patch_size**2
    low, high = processor.image_min_pixels, processor.image_max_pixels
    if flags.image_min_tokens is not None:
        low = flags.image_min_tokens * cell
    if flags.image_max_tokens is not None:
        high = flags.image_max_tokens * cell
    high = min(high, frame_pixels)
    if not 0 < low <= high:
        raise ConfigError(
            f"pictures of {low} to {high} pixels ({low // cell} to {high // cell} tokens) are "
            "none: --image-min-tokens must be positive and not above --image-max-tokens, and "
            f"--max-frame-patches ({limits.max_frame_patches}) not below the former"
        )
    video_high = min(processor.video_max_pixels, frame_pixels * processor.temporal_patch_size)
    return dataclasses.replace(
        processor,
        image_min_pixels=low,
        image_max_pixels=high,
        video_min_pixels=min(processor.video_min_pixels, video_high),
        video_max_pixels=video_high,
        video_min_frames=min(processor.video_min_frames, limits.max_video_frames),
        video_max_frames=min(processor.video_max_frames, limits.max_video_frames),
    )


def page_bytes(family: Family, cfg: Any, page_size: int, dtype: DType, platform: str) -> int:
    """Bytes of one KV page over all layers, all devices together."""
    size = cache_dtype(dtype, platform).itemsize
    return sum(
        c.num_layers * page_size * 2 * c.num_kv_heads * c.head_dim * size
        for c in family.caches(cfg)
    )


def _kv_bytes(flags: ServeFlags, defaults: PlatformDefaults, mesh: Mesh, held_bytes: int) -> int:
    """Memory for KV pages over all devices: what is asked for, or what the devices have left."""
    if flags.kv_cache_memory_bytes is not None:
        return flags.kv_cache_memory_bytes
    if defaults.kv_bytes is not None:
        return defaults.kv_bytes
    stats = mesh.devices.flat[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        raise ConfigError("the devices do not report their memory: give --kv-cache-memory-bytes")
    size = meshes.model_size(mesh)
    left = int((limit * flags.hbm_utilization - _RESERVE_BYTES) * size) - held_bytes
    if left <= 0:
        raise ConfigError(
            f"{size} devices of {limit} bytes at --hbm-utilization {flags.hbm_utilization} hold "
            f"no KV pages beside {held_bytes} bytes of weights and media rows: raise "
            "--tensor-parallel-size, or lower --max-frame-patches"
        )
    return left


def _pool_row_bytes(family: Family, cfg: Any, dtype: DType) -> int:
    levels = 1 + family.geometry(cfg).num_levels
    return levels * family.text_width(cfg) * (2 if dtype == "bfloat16" else 4)


def engine_config(
    flags: ServeFlags,
    family: Family,
    cfg: Any,
    mesh: Mesh,
    modalities: tuple[str, ...],
    max_positions: int,
) -> EngineConfig:
    """Every size of the engine, from the flags, the model and the machine.

    Args:
        flags: what the operator gave.
        family: the model's record.
        cfg: its parsed config.
        mesh: the devices.
        modalities: served media; () is text alone.
        max_positions: the model's own context limit, in tokens.

    Raises:
        ConfigError: sizes that do not fit each other or the machine.
    """
    defaults = PLATFORMS[meshes.platform(mesh)]
    dtype = dtype_of(flags, meshes.platform(mesh))
    max_model_len = flags.max_model_len or min(defaults.max_model_len, max_positions)
    if max_model_len > max_positions:
        raise ConfigError(
            f"--max-model-len {max_model_len} exceeds the model's {max_positions} positions"
        )
    num_seqs = flags.max_num_seqs or defaults.max_num_seqs
    num_tokens = flags.max_num_batched_tokens or max(defaults.max_num_batched_tokens, num_seqs)
    page_size = flags.block_size or defaults.page_size
    vision = _vision_sizes(flags, family, cfg, mesh, defaults, num_tokens) if modalities else {}
    held = tree.num_bytes(family.abstract_params(cfg, dtype))
    if modalities:
        held += vision["pool_rows"] * _pool_row_bytes(family, cfg, dtype)
    size = page_bytes(family, cfg, page_size, dtype, meshes.platform(mesh))
    pages_per_seq = -(-max_model_len // page_size)
    num_pages = min(num_seqs * pages_per_seq, _kv_bytes(flags, defaults, mesh, held) // size)
    return EngineConfig(
        dtype=dtype,
        tensor_parallel_size=meshes.model_size(mesh),
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        max_num_queued_reqs=flags.max_num_queued_reqs,
        page_size=page_size,
        num_pages=num_pages,
        token_capacities=buckets.token_capacities(num_tokens, num_seqs),
        modalities=modalities,
        **vision,
    )


def _vision_sizes(
    flags: ServeFlags,
    family: Family,
    cfg: Any,
    mesh: Mesh,
    defaults: PlatformDefaults,
    num_tokens: int,
) -> dict[str, Any]:
    geometry = family.geometry(cfg)
    frame_patches = flags.max_frame_patches or defaults.max_frame_patches
    plan = buckets.patch_plan(
        frame_patches, defaults.row_block, meshes.model_size(mesh), geometry.merge_size
    )
    frame_rows = plan.capacities[-1] // geometry.merge_size**2
    return {
        "patch_capacities": plan.capacities,
        "row_block": plan.row_block,
        # The largest frame and one chunk are what progress needs; a second frame is cache.
        "pool_rows": 2 * frame_rows + num_tokens,
        "vision_step_patch_layers": max(defaults.vision_step_patch_layers, plan.capacities[-1]),
    }
