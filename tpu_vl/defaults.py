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
from tpu_vl.flags import ServeFlags, SizeFlags
from tpu_vl.kernels.chips import Chip, chip_of
from tpu_vl.models.family import Family, VisionGeometry
from tpu_vl.precompile import buckets, footprint, tower_plan
from tpu_vl.precompile.estimate import TowerMode, TowerSizes
from tpu_vl.precompile.program_sizes import ModelShape, total_code
from tpu_vl.precompile.programs import make_backend


@dataclass(frozen=True, kw_only=True)
class PlatformDefaults:
    """What a flag that is not given becomes on one platform.

    Args:
        kv_bytes: KV memory of a platform that does not report its own; None: it reports.
        row_steps: of `buckets.patch_plan`.
        patch_layers_per_s: tower speed that `--max-vision-step-ms` counts with where no chip is
            tabled, in patches times layers a second of a device.
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
    row_steps: int
    patch_layers_per_s: float


PUBLISHED_PROCESSOR = ProcessorConfig()
"""The patch rules of the published checkpoints."""

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
        row_steps=4,
        patch_layers_per_s=2e7,
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
        row_steps=4,
        patch_layers_per_s=2e7,
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
        row_steps=2,
        patch_layers_per_s=1.6e6,
    ),
}


def dtype_of(flags: SizeFlags, platform: str) -> DType:
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
    counts = media_counts(flags)
    return MediaLimits(
        max_images=counts["image"],
        max_videos=counts["video"],
        max_video_frames=given["video"].get("num_frames", base.max_video_frames),
        max_bytes=flags.max_media_mb << 20,
        max_request_patches=flags.max_request_patches or base.max_request_patches,
        max_frame_patches=max_frame_patches,
        fetch_timeout_s=flags.media_fetch_timeout_s,
        allowed_local_media_path=flags.allowed_local_media_path,
        allow_private_addresses=flags.allow_private_media_addresses,
    )


def media_counts(flags: SizeFlags) -> dict[str, int]:
    """Pictures and videos that one request may hold, {"image": ..., "video": ...}."""
    base, given = MediaLimits(), _prompt_limits(flags)
    return {
        "image": given["image"].get("count", base.max_images),
        "video": given["video"].get("count", base.max_videos),
    }


def _prompt_limits(flags: SizeFlags) -> dict[str, dict[str, int]]:
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
    processor: ProcessorConfig, flags: SizeFlags, limits: MediaLimits
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


def _with_pages(
    flags: SizeFlags,
    defaults: PlatformDefaults,
    family: Family,
    cfg: Any,
    mesh: Mesh,
    smallest: EngineConfig,
) -> EngineConfig:
    """The config with its KV pages: those that are asked for, or what the devices have left."""
    backend = make_backend(mesh, smallest)
    one_page = footprint.page_bytes(family, cfg, smallest, backend)
    given = flags.kv_cache_memory_bytes or defaults.kv_bytes
    if given is not None:
        most = smallest.max_num_seqs * smallest.max_pages_per_seq
        pages = given // (one_page * meshes.model_size(mesh))
        return dataclasses.replace(smallest, num_pages=min(most, pages))
    held = footprint.footprint(family, cfg, smallest, backend)
    budget_bytes = _device_bytes(mesh) * flags.hbm_utilization
    if meshes.platform(mesh) != "tpu" and held.total > budget_bytes:
        raise ConfigError(
            f"a device needs {held.total} bytes for weights, media rows and one longest request, "
            f"but may fill {budget_bytes:.0f}: raise --tensor-parallel-size, or lower "
            "--max-model-len or --max-frame-patches"
        )
    return footprint.with_pages(smallest, held, one_page, budget_bytes)


def _device_bytes(mesh: Mesh) -> int:
    """Memory of one device: of a TPU as tabled, so that a described one gets the same sizes."""
    device = mesh.devices.flat[0]
    if device.platform == "tpu":
        return chip_of(device.device_kind).hbm_bytes
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise ConfigError("the devices do not report their memory: give --kv-cache-memory-bytes")
    return limit


def engine_config(
    flags: SizeFlags,
    family: Family,
    cfg: Any,
    mesh: Mesh,
    modalities: tuple[str, ...],
    max_positions: int,
    processor: ProcessorConfig = PUBLISHED_PROCESSOR,
) -> EngineConfig:
    """Every size of the engine, from the flags, the model and the machine.

    Args:
        flags: what the operator gave.
        family: the model's record.
        cfg: its parsed config.
        mesh: the devices.
        modalities: served media; () is text alone.
        max_positions: the model's own context limit, in tokens.
        processor: the checkpoint's patch rules.

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
    vision: dict[str, Any] = {}
    if modalities:
        vision = _vision_sizes(flags, family, cfg, mesh, modalities, num_tokens, processor)
    smallest = EngineConfig(
        dtype=dtype,
        tensor_parallel_size=meshes.model_size(mesh),
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        page_size=page_size,
        num_pages=-(-max_model_len // page_size),
        token_capacities=buckets.token_capacities(num_tokens, num_seqs),
        modalities=modalities,
        **vision,
    )
    if meshes.platform(mesh) == "tpu":
        smallest = _within_code_budget(flags, footprint.model_shape(family, cfg, mesh), smallest)
    return _with_pages(flags, defaults, family, cfg, mesh, smallest)


def _within_code_budget(flags: SizeFlags, shape: ModelShape, config: EngineConfig) -> EngineConfig:
    """The config without its largest text programs, until the code of all programs fits.

    Every layer is unrolled in every text program, so code grows with the number of programs and
    with their tokens. The largest prefill steps are the ones to give up: from 1024 tokens on a
    step is bound by the matrix units, and two steps take as long as one of twice the tokens.
    """
    num_tokens = config.max_num_batched_tokens
    while (code := total_code(shape, config)) > flags.code_budget:
        *smaller, top = config.token_capacities
        if flags.max_num_batched_tokens or not smaller or smaller[-1] < config.max_num_seqs:
            raise ConfigError(
                f"the programs of --max-num-batched-tokens {top} and --max-num-seqs "
                f"{config.max_num_seqs} take about {code} bytes of code, more than --code-budget "
                f"{flags.code_budget}: raise it, or lower the first two"
            )
        config = dataclasses.replace(
            config, token_capacities=tuple(smaller), max_num_batched_tokens=smaller[-1]
        )
    unused_rows = num_tokens - config.max_num_batched_tokens if config.pool_rows else 0
    return dataclasses.replace(config, pool_rows=config.pool_rows - unused_rows)


def tower_mode(
    flags: SizeFlags, family: Family, cfg: Any, mesh: Mesh, processor: ProcessorConfig
) -> TowerMode:
    """How the devices share the tower; see `tower_plan.choose_mode`.

    Args:
        flags: what the operator gave.
        family, cfg: the model as parsed, with a tower.
        mesh: the devices.
        processor: the checkpoint's.
    """
    platform = meshes.platform(mesh)
    frame = flags.max_frame_patches or PLATFORMS[platform].max_frame_patches
    params = family.abstract_params(cfg, dtype_of(flags, platform))
    return tower_plan.choose_mode(
        flags.mm_encoder_tp_mode,
        _tower_sizes(family, cfg),
        tree.num_bytes(params.vision),
        fit_processor(processor, flags, MediaLimits(max_frame_patches=frame)),
        _chip(mesh),
        meshes.model_size(mesh),
        frame,
    )


def _tower_sizes(family: Family, cfg: Any) -> TowerSizes:
    return TowerSizes.of(family.dims(cfg)["vision"], family.geometry(cfg).num_levels)


def _chip(mesh: Mesh) -> Chip | None:
    """The tabled facts of the devices; None where they are no TPUs."""
    device = mesh.devices.flat[0]
    return chip_of(device.device_kind) if device.platform == "tpu" else None


def patch_plan(
    flags: SizeFlags,
    geometry: VisionGeometry,
    mesh: Mesh,
    modalities: tuple[str, ...],
    processor: ProcessorConfig,
) -> buckets.PatchPlan:
    """The tower's shapes: up to the largest frame that flags, platform and processor allow."""
    defaults = PLATFORMS[meshes.platform(mesh)]
    limit = flags.max_frame_patches or defaults.max_frame_patches
    fitted = fit_processor(processor, flags, MediaLimits(max_frame_patches=limit))
    return buckets.patch_plan(
        min(limit, buckets.largest_frame(fitted, modalities)),
        defaults.row_block,
        meshes.model_size(mesh),
        geometry.merge_size,
        num_bins=geometry.num_bins,
        row_steps=defaults.row_steps,
    )


def _vision_sizes(
    flags: SizeFlags,
    family: Family,
    cfg: Any,
    mesh: Mesh,
    modalities: tuple[str, ...],
    num_tokens: int,
    processor: ProcessorConfig,
) -> dict[str, Any]:
    geometry, defaults = family.geometry(cfg), PLATFORMS[meshes.platform(mesh)]
    plan = patch_plan(flags, geometry, mesh, modalities, processor)
    work = tower_plan.step_work(
        _tower_sizes(family, cfg),
        _chip(mesh),
        meshes.model_size(mesh),
        "data" if geometry.num_bins > 1 else "weights",
        max_step_ms=flags.max_vision_step_ms,
        row_block=plan.row_block,
        patch_layers_per_s=defaults.patch_layers_per_s,
    )
    frame_rows = plan.max_frame_patches // geometry.merge_size**2
    return {
        "patch_capacities": plan.capacities,
        "row_block": plan.row_block,
        "row_steps": plan.row_steps,
        # The largest frame and one chunk are what progress needs; a second frame is cache.
        "pool_rows": 2 * frame_rows + num_tokens,
        "vision_step_patch_layers": work.patch_layers,
        "vision_attention_patches": work.attention_patches,
    }
