"""A checkpoint folder: where it is, what its JSON files say, how its processor makes patches."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_vl import demo
from tpu_vl.config import ProcessorConfig
from tpu_vl.errors import ConfigError

# What serving reads of a hub repository; everything else in it stays there.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")
_HUB_CONFIGS = ("*config.json",)

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint's folder and its parsed files.

    Args:
        name: what the operator called it: hub id or folder.
        folder: where its files are.
        config: config.json.
        generation: generation_config.json, {} where there is none.
        preprocessor: preprocessor_config.json, None where there is none.
        video_preprocessor: video_preprocessor_config.json, None where there is none.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    preprocessor: Mapping[str, Any] | None
    video_preprocessor: Mapping[str, Any] | None

    def max_positions(self) -> int:
        """The context that the model was made for, in tokens.

        Raises:
            ConfigError: config.json does not say.
        """
        text = self.config.get("text_config", self.config)
        if not isinstance(text.get("max_position_embeddings"), int):
            raise ConfigError(
                f"{self.folder}/config.json has no max_position_embeddings in its text section"
            )
        return text["max_position_embeddings"]

    def sampling_defaults(self) -> dict[str, object]:
        """The sampling values that generation_config.json sets."""
        return {k: self.generation[k] for k in _SAMPLING_KEYS if self.generation.get(k) is not None}


def open_checkpoint(
    model: str | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    configs_only: bool = False,
) -> Checkpoint:
    """Finds a checkpoint, downloading it from the hub where `model` is no folder.

    Args:
        model: folder or hub id; None is the bundled model.
        revision: hub revision; None is the default branch.
        download_dir: hub cache folder; None is the hub library's own.
        configs_only: download neither weights nor tokenizer; `model` may also be the file of a
            config.json.

    Raises:
        ConfigError: neither a folder with a config.json nor a hub id that can be had.
    """
    model = str(demo.CHECKPOINT) if model is None else model
    folder = Path(model).expanduser()
    if configs_only and folder.is_file():
        return Checkpoint(
            name=model,
            folder=folder.parent,
            config=_read(folder),
            generation={},
            preprocessor=None,
            video_preprocessor=None,
        )
    if not folder.is_dir():
        files = _HUB_CONFIGS if configs_only else _HUB_FILES
        folder = _download(model, revision, download_dir, files)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {model}: the folder {folder} has no config.json")
    return Checkpoint(
        name=model,
        folder=folder,
        config=_read(folder / "config.json"),
        generation=_read_optional(folder / "generation_config.json") or {},
        preprocessor=_read_optional(folder / "preprocessor_config.json"),
        video_preprocessor=_read_optional(folder / "video_preprocessor_config.json"),
    )


def _download(
    model: str, revision: str | None, download_dir: str | None, files: Sequence[str]
) -> Path:
    import huggingface_hub  # costs half a second that a local folder need not pay

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, cache_dir=download_dir, allow_patterns=list(files)
            )
        )
    except Exception as error:  # the library raises a dozen unrelated types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"--model {model} is no folder here and cannot be had from the hub ({reason}); "
            "give a folder, or check the name, --revision and the network"
        ) from error


def _read(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, not an object")
    return value


def _read_optional(path: Path) -> Mapping[str, Any] | None:
    return _read(path) if path.is_file() else None


def _bounds(section: Mapping[str, Any], low: int, high: int) -> tuple[int, int]:
    """Pixel bounds in either of the two spellings that processors have used."""
    size = section.get("size") or {}
    minimum = section.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
    maximum = section.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    return int(minimum or low), int(maximum or high)


def _triple(values: Any, default: tuple[float, float, float]) -> tuple[float, float, float]:
    return default if values is None else (float(values[0]), float(values[1]), float(values[2]))


def processor_config(checkpoint: Checkpoint) -> ProcessorConfig:
    """The processor settings of a checkpoint; absent files and keys keep the family's defaults.

    Raises:
        ConfigError: bounds that contradict each other.
    """
    base = ProcessorConfig()
    image = checkpoint.preprocessor or {}
    video = checkpoint.video_preprocessor or image
    image_low, image_high = _bounds(image, base.image_min_pixels, base.image_max_pixels)
    video_section = checkpoint.video_preprocessor or {}
    video_low, video_high = _bounds(video_section, base.video_min_pixels, base.video_max_pixels)
    if image_low > image_high or video_low > video_high:
        raise ConfigError(
            f"the checkpoint's processor has pixel bounds {image_low}..{image_high} for pictures "
            f"and {video_low}..{video_high} for videos: the lower must not exceed the upper"
        )
    return dataclasses.replace(
        base,
        patch_size=int(image.get("patch_size", base.patch_size)),
        temporal_patch_size=int(image.get("temporal_patch_size", base.temporal_patch_size)),
        merge_size=int(image.get("merge_size", base.merge_size)),
        image_min_pixels=image_low,
        image_max_pixels=image_high,
        video_min_pixels=video_low,
        video_max_pixels=video_high,
        video_fps=float(video.get("fps") or base.video_fps),
        video_min_frames=int(video.get("min_frames") or base.video_min_frames),
        video_max_frames=int(video.get("max_frames") or base.video_max_frames),
        mean=_triple(image.get("image_mean"), base.mean),
        std=_triple(image.get("image_std"), base.std),
    )
