"""Every command-line flag, once: parser, environment variables and docs/flags.md come from here.

A flag `--max-num-seqs` is also the variable `TPU_VL_MAX_NUM_SEQS`; the command line wins.
`python -m tpu_vl.flags > docs/flags.md` writes the document anew.
"""

import argparse
import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tpu_vl.errors import ConfigError

F = TypeVar("F")
ENV_PREFIX = "TPU_VL_"


def _flag(
    default: Any,
    text: str,
    *aliases: str,
    choices: tuple[str, ...] | None = None,
    minimum: float = 1,
    maximum: float = math.inf,
) -> Any:
    """A flag; numbers outside `minimum` to `maximum` are refused."""
    return dataclasses.field(
        default=default,
        metadata={
            "text": text,
            "aliases": aliases,
            "choices": choices,
            "bounds": (minimum, maximum),
        },
    )


@dataclass(frozen=True, kw_only=True)
class SizeFlags:
    """What decides every size: the model, the devices and the limits."""

    model: str | None = _flag(None, "folder or hub id of the checkpoint (default: bundled model)")
    revision: str | None = _flag(None, "hub revision of --model")
    download_dir: str | None = _flag(None, "where hub downloads are kept")
    tensor_parallel_size: int = _flag(1, "devices that one model is split over", "-tp")
    dtype: str = _flag(
        "auto",
        "of weights and activations; auto: bfloat16 on TPU and GPU, float32 on CPU",
        choices=("auto", "bfloat16", "float32"),
    )
    max_model_len: int | None = _flag(None, "prompt plus answer, in tokens")
    max_num_seqs: int | None = _flag(None, "sequences that run at once")
    max_num_batched_tokens: int | None = _flag(None, "tokens of one step")
    block_size: int | None = _flag(None, "tokens per KV page")
    kv_cache_memory_bytes: int | None = _flag(None, "device memory for KV pages, all devices")
    hbm_utilization: float = _flag(
        0.9,
        "share of device memory to fill, on devices whose memory is known",
        "--gpu-memory-utilization",
        minimum=0.01,
        maximum=1.0,
    )
    code_budget: int = _flag(
        1 << 30,
        "device memory for the code of all programs, in bytes, on TPUs; where the default "
        "--max-num-batched-tokens needs more it becomes the next smaller capacity",
    )
    limit_mm_per_prompt: str | None = _flag(
        None, 'media per request, as JSON: {"image": 8, "video": 0}; 0 refuses the modality'
    )
    image_min_tokens: int | None = _flag(None, "smaller pictures are scaled up to this many tokens")
    image_max_tokens: int | None = _flag(None, "larger pictures are scaled down to so many tokens")
    max_frame_patches: int | None = _flag(None, "patches of the largest picture or video frame")
    text_model_only: bool = _flag(
        False,
        "serve text alone: the tower is neither read nor given memory",
        "--language-model-only",
    )
    mm_disable: str | None = _flag(None, "leave out a modality's encoder", choices=("vision",))
    mm_encoder_tp_mode: str = _flag(
        "auto",
        "how several devices share the vision tower: weights splits heads and MLPs, data gives "
        "each device the whole tower and frames of its own; auto: the faster by estimate",
        choices=("auto", "weights", "data"),
    )
    max_vision_step_ms: float = _flag(
        20.0,
        "estimated time of tower work between two decode steps, in milliseconds; one layer of a "
        "call always runs",
        minimum=0.01,
    )


@dataclass(frozen=True, kw_only=True)
class ServeFlags(SizeFlags):
    """Flags of `tpu-vl serve`; the help texts say what each does."""

    served_model_name: str | None = _flag(None, "id in requests and answers (default: the model)")
    load_format: str = _flag(
        "auto", "auto reads the checkpoint, dummy makes random weights", choices=("auto", "dummy")
    )
    generation_config: str = _flag(
        "auto",
        "sampling defaults: auto takes the checkpoint's generation_config.json, none takes none",
        choices=("auto", "none"),
    )
    chat_template: str | None = _flag(None, "file of a Jinja chat template to use instead")
    host: str = _flag("127.0.0.1", "address to listen on")
    port: int = _flag(8000, "port to listen on", minimum=0)
    shutdown_timeout_s: int = _flag(
        30,
        "longest that running answers go on after SIGTERM, in seconds",
        "--shutdown-timeout",
        minimum=0,
    )
    api_key: str | None = _flag(None, "bearer token that requests must carry")
    max_request_mb: int = _flag(256, "largest request body, in MiB")
    max_num_queued_reqs: int = _flag(256, "waiting requests before new ones get 503", minimum=0)
    max_request_patches: int | None = _flag(None, "patches of all media of one request")
    max_media_mb: int = _flag(64, "largest encoded picture or video, in MiB")
    media_fetch_timeout_s: float = _flag(
        20.0, "limit for fetching one http(s) medium, in seconds", minimum=0.1
    )
    allowed_local_media_path: str | None = _flag(None, "folder that file:// media may come from")
    allow_private_media_addresses: bool = _flag(
        False, "http(s) media may come from private and loopback addresses"
    )
    num_preprocess_workers: int | None = _flag(None, "threads that decode and resize media")
    mm_preprocess_gb: int = _flag(4, "host memory for patches of unfinished requests, in GiB")
    executables: str | None = _flag(
        None,
        "folder or gs:// address of compiled programs; loading runs code: naming it trusts it "
        "(default: a private folder of the user)",
    )
    executables_digest: str | None = _flag(
        None, "load only the programs of the manifest with this digest, as precompile prints it"
    )
    require_executables: bool = _flag(
        False, "end with the reason instead of compiling a program that is not there"
    )
    precompile_only: bool = _flag(
        False, "compile for this machine's devices into --executables, write _READY, exit 0"
    )
    seed: int = _flag(0, "of the random weights of --load-format dummy", minimum=0)
    log_level: str = _flag("info", "of the log", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, kw_only=True)
class PrecompileFlags(SizeFlags):
    """Flags of `tpu-vl precompile`: those of `serve` that decide a size, and where to."""

    target: str | None = _flag(
        None,
        "TPUs to compile for: a topology (v6e:2x2) or a GKE machine type and topology "
        "(ct6e-standard-4t:2x4)",
    )
    out: str | None = _flag(
        None, "folder or gs:// address for the programs (default: a private folder of the user)"
    )


@dataclass(frozen=True, kw_only=True)
class PlanFlags(SizeFlags):
    """Flags of `tpu-vl plan`: those of `serve` that decide a size, and for which TPUs."""

    target: str | None = _flag(
        None,
        "TPUs to plan for: a topology (v6e:2x2) or a GKE machine type and topology "
        "(ct6e-standard-4t:2x4)",
    )
    fast: bool = _flag(False, "by formula alone: nothing is compiled")
    json: bool = _flag(False, "print JSON instead of a table")


@dataclass(frozen=True, kw_only=True)
class AccuracyFlags:
    """Flags of `tpu-vl accuracy`."""

    suite: str = _flag("bundled", "suite of samples and marks", choices=("bundled",))
    base_url: str | None = _flag(
        None, "measure a running server (default: serves the suite's model itself)"
    )
    dtypes: str = _flag("float32,bfloat16", "dtypes to serve it in, where it serves itself")
    num_samples: int = _flag(60, "samples per task")
    concurrency: int = _flag(8, "requests at once")
    output: str | None = _flag(None, "file for the scores as JSON")


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    """Flags of `tpu-vl demo`."""

    port: int = _flag(0, "port of the demo's server (0: a free one)", minimum=0)


COMMANDS: Mapping[str, tuple[type, str]] = {
    "serve": (ServeFlags, "serve a model over HTTP"),
    "precompile": (PrecompileFlags, "compile a model's programs for TPUs that are not here"),
    "plan": (PlanFlags, "say whether a model fits TPUs, and how fast it will be"),
    "accuracy": (AccuracyFlags, "measure answers through the API against marks"),
    "demo": (DemoFlags, "serve the bundled model and ask it about pictures and a clip"),
}
"""Every command of `tpu-vl`: its flags and what it is for."""


def option_name(field: str) -> str:
    """`max_num_seqs` -> `--max-num-seqs`."""
    return "--" + field.replace("_", "-")


def env_name(field: str) -> str:
    """`max_num_seqs` -> `TPU_VL_MAX_NUM_SEQS`."""
    return ENV_PREFIX + field.upper()


def _scalar_type(annotation: Any) -> type:
    if isinstance(annotation, types.UnionType):
        return next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation


def add_flags(parser: argparse.ArgumentParser, flags: type) -> None:
    """Adds every field of a flags class to a parser; unset flags stay absent."""
    for field in dataclasses.fields(flags):
        names = [option_name(field.name), *field.metadata["aliases"]]
        text = field.metadata["text"]
        if field.type is bool:
            parser.add_argument(
                *names, dest=field.name, action="store_true", default=argparse.SUPPRESS, help=text
            )
            continue
        if field.default is not None:
            text = f"{text} (default: {field.default})".replace("%", "%%")
        parser.add_argument(
            *names,
            dest=field.name,
            type=_scalar_type(field.type),
            choices=field.metadata["choices"],
            default=argparse.SUPPRESS,
            help=text,
        )


def _from_env(field: dataclasses.Field[Any], value: str) -> Any:
    wanted = _scalar_type(field.type)
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(f"{env_name(field.name)}={value!r} is none of {', '.join(choices)}")
    if wanted is bool:
        if value.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{env_name(field.name)}={value!r} is none of 0, 1, true, false")
        return value.lower() in ("1", "true")
    try:
        return wanted(value)
    except ValueError:
        raise ConfigError(
            f"{env_name(field.name)}={value!r} is not a valid {wanted.__name__}"
        ) from None


def read_flags(flags: type[F], parsed: argparse.Namespace, environ: Mapping[str, str]) -> F:
    """A flags object from the command line, then `TPU_VL_*`, then the defaults.

    Raises:
        ConfigError: a variable's value does not fit its flag, or a number is out of bounds.
    """
    values = {}
    for field in dataclasses.fields(flags):  # pyright: ignore[reportArgumentType]
        if hasattr(parsed, field.name):
            values[field.name] = getattr(parsed, field.name)
        elif env_name(field.name) in environ:
            values[field.name] = _from_env(field, environ[env_name(field.name)])
        _check_bounds(field, values.get(field.name))
    return flags(**values)


def _check_bounds(field: dataclasses.Field[Any], value: Any) -> None:
    low, high = field.metadata["bounds"]
    if isinstance(value, bool) or not isinstance(value, int | float) or low <= value <= high:
        return
    limit = f"at least {low}" if value < low else f"at most {high}"
    raise ConfigError(f"{option_name(field.name)} {value} must be {limit}")


def join_dotted(arguments: Sequence[str]) -> list[str]:
    """Rewrites `--limit-mm-per-prompt.image 2` into the JSON form of the same flag."""
    head = "--limit-mm-per-prompt."
    rest: list[str] = []
    dotted: dict[str, Any] = {}
    queue = list(arguments)
    while queue:
        item = queue.pop(0)
        if not item.startswith(head):
            rest.append(item)
            continue
        name, _, value = item.removeprefix(head).partition("=")
        if not value and not queue:
            raise ConfigError(f"{item} needs a value")
        dotted[name] = _json_or_text(value or queue.pop(0))
    return [*rest, "--limit-mm-per-prompt", json.dumps(dotted)] if dotted else rest


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value  # refused with the whole flag, where its meaning is known


def flag_table(flags: type) -> str:
    """The Markdown table of a flags class, as docs/flags.md holds it."""
    lines = ["| flag | default | what it does |", "|---|---|---|"]
    for field in dataclasses.fields(flags):
        names = " ".join(f"`{n}`" for n in (option_name(field.name), *field.metadata["aliases"]))
        default = "" if field.default is None else f"`{field.default}`"
        text = field.metadata["text"]
        if field.metadata["choices"]:
            text += f" ({', '.join(field.metadata['choices'])})"
        lines.append(f"| {names} | {default} | {text} |")
    return "\n".join(lines) + "\n"


def document() -> str:
    """The whole of docs/flags.md."""
    parts = [
        "# Flags\n",
        "Every flag is also an environment variable: `--max-num-seqs` is `TPU_VL_MAX_NUM_SEQS`. "
        "The command\nline wins. A flag that is accepted does what it says, or the start fails "
        "with the reason.\n",
    ]
    for name, (flags, text) in COMMANDS.items():
        parts += [f"## `tpu-vl {name}`: {text}\n", flag_table(flags)]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(document())
