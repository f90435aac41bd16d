"""From flags to a model that answers: the one place where all parts are wired, in order.

Checkpoint and family, what is served, sizes, programs, weights, executables, engine. Nothing large
is read or compiled before the sizes are known to fit each other.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tpu_vl import defaults, demo
from tpu_vl.chat.template import ChatTemplate
from tpu_vl.chat.tokenizer import Tokenizer
from tpu_vl.checkpoint import Checkpoint, open_checkpoint, processor_config
from tpu_vl.config import EngineConfig, MediaLimits, ProcessorConfig, ServerConfig
from tpu_vl.engine.client import EngineClient
from tpu_vl.engine.engine import Engine, EngineThread
from tpu_vl.engine.layout import BIAS_CAPACITY, STOP_CAPACITY
from tpu_vl.engine.runner import Runner
from tpu_vl.errors import ConfigError
from tpu_vl.flags import ServeFlags
from tpu_vl.mesh import make_mesh
from tpu_vl.models.family import Family, check_family
from tpu_vl.models.registry import family_of
from tpu_vl.precompile import executables
from tpu_vl.precompile.compile import Progress, compile_all
from tpu_vl.precompile.programs import ZEROS, make_backend, programs
from tpu_vl.server.state import Capability, LoadedModel, ServerState
from tpu_vl.weights.load import load_params
from tpu_vl.weights.random import random_params

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will run, decided before a weight is read.

    Args:
        checkpoint, family, cfg: the model; `cfg.vision` is None where no media are served.
        capability: served modalities.
        processor: patch rules under the limits; None in a text-only process.
        limits: what is accepted as media.
        mesh: the devices.
        engine_config: every size.
    """

    checkpoint: Checkpoint
    family: Family
    cfg: Any
    capability: Capability
    processor: ProcessorConfig | None
    limits: MediaLimits
    mesh: Mesh
    engine_config: EngineConfig


def capability_of(family: Family, checkpoint: Checkpoint, flags: ServeFlags) -> Capability:
    """Served modalities: registered by the family, in the checkpoint, not disabled.

    One row of the registry and the flags decide; front end and engine read the result only.
    """
    reasons: dict[str, str] = {}
    limits = defaults.media_limits(flags, 0)
    counts = {"image": limits.max_images, "video": limits.max_videos}
    for modality in ("image", "video"):
        if modality not in family.modalities:
            reasons[modality] = f"the family {family.name} has no encoder for it"
        elif checkpoint.config.get("vision_config") is None:
            reasons[modality] = "the checkpoint has no vision section"
        elif flags.text_model_only:
            reasons[modality] = "the server was started with --text-model-only"
        elif flags.mm_disable == "vision":
            reasons[modality] = "the server was started with --mm-disable vision"
        elif counts[modality] == 0:
            reasons[modality] = "the server was started with --limit-mm-per-prompt of 0 for it"
    served = tuple(m for m in ("image", "video") if m not in reasons)
    return Capability(modalities=served, reason_by_modality=reasons)


def make_plan(flags: ServeFlags) -> Plan:
    """Reads the checkpoint's JSON files and decides every size.

    Raises:
        ConfigError: the checkpoint, the flags and the machine do not fit; names the remedy.
    """
    checkpoint = open_checkpoint(
        flags.model or str(demo.CHECKPOINT),
        revision=flags.revision,
        download_dir=flags.download_dir,
    )
    family = family_of(dict(checkpoint.config))
    check_family(family)
    capability = capability_of(family, checkpoint, flags)
    has_media = bool(capability.modalities)
    cfg = family.parse_config(
        dict(checkpoint.config), with_vision=has_media, preprocessor=checkpoint.preprocessor
    )
    mesh = make_mesh(flags.tensor_parallel_size)
    engine_config = defaults.engine_config(
        flags, family, cfg, mesh, capability.modalities, checkpoint.max_positions()
    )
    frame_patches = engine_config.patch_capacities[-1] if has_media else 0
    limits = defaults.media_limits(flags, frame_patches)
    processor = None
    if has_media:
        processor = defaults.fit_processor(processor_config(checkpoint), flags, limits)
    return Plan(
        checkpoint=checkpoint,
        family=family,
        cfg=cfg,
        capability=capability,
        processor=processor,
        limits=limits,
        mesh=mesh,
        engine_config=engine_config,
    )


def describe(plan: Plan) -> list[str]:
    """The limits that the server will hold to, one line each, printed at start."""
    e, device = plan.engine_config, plan.mesh.devices.flat[0]
    lines = [
        f"model {plan.checkpoint.name} ({plan.family.name}), {e.dtype}, "
        f"{e.tensor_parallel_size} x {device.device_kind} ({device.platform})",
        f"serves text{''.join(f', {m}' for m in plan.capability.modalities)}; context "
        f"{e.max_model_len} tokens; {e.max_num_seqs} sequences at once; "
        f"{e.max_num_batched_tokens} tokens a step",
        f"KV cache {e.num_pages} pages of {e.page_size} tokens",
    ]
    if plan.processor is not None:
        cell = plan.processor.factor**2
        lines.append(
            f"pictures of {plan.processor.image_min_pixels // cell} to "
            f"{plan.processor.image_max_pixels // cell} tokens; at most "
            f"{plan.limits.max_images} pictures and {plan.limits.max_videos} videos a request; "
            f"{e.pool_rows} media rows on the device"
        )
    return lines


def server_config(flags: ServeFlags, plan: Plan) -> ServerConfig:
    """What the HTTP side is told."""
    bundled = plan.checkpoint.folder == demo.CHECKPOINT
    default_name = "tpu-vl-demo" if bundled else plan.checkpoint.name.rstrip("/")
    base = ServerConfig()
    return ServerConfig(
        host=flags.host,
        port=flags.port,
        served_model_names=(flags.served_model_name or default_name,),
        api_key=flags.api_key,
        max_request_bytes=flags.max_request_mb << 20,
        num_preprocess_workers=flags.num_preprocess_workers or base.num_preprocess_workers,
        preprocess_bytes=flags.mm_preprocess_gb << 30,
        notice=demo.NOTICE if bundled else None,
        generation_defaults=(
            plan.checkpoint.sampling_defaults() if flags.generation_config == "auto" else {}
        ),
    )


def make_executables(
    plan: Plan, folder: Path | None, report: Callable[[str, int, int], None]
) -> dict[str, jax.stages.Compiled]:
    """The table of executables, from the store where they are kept, else compiled.

    Args:
        plan: what will run.
        folder: the store's folder; None is the per-user cache.
        report: told of each finished program.
    """
    backend = make_backend(plan.mesh, plan.engine_config)
    listed = programs(plan.family, plan.cfg, plan.engine_config, backend)
    root = executables.default_folder() if folder is None else folder
    executables.make_private(root)
    configs = {"model": plan.cfg, "engine": plan.engine_config, "family": plan.family.name}
    configs |= {"implementations": (backend.vision_attention, backend.paged_attention)}
    store = executables.Store(root, executables.key_fields(plan.mesh, configs))
    log.info("%d programs, kept in %s", len(listed), store.key_folder)
    bar = _Bar("programs")
    compiled = 0

    def progress(p: Progress) -> None:
        nonlocal compiled
        compiled += p.compiled
        bar.show(
            p.done,
            p.total,
            f"{p.name} {'compiled' if p.compiled else 'loaded'} in {p.seconds:.1f} s, "
            f"about {p.remaining_s:.0f} s left",
        )
        report("programs", p.done, p.total)

    report("programs", 0, len(listed))
    table = compile_all(listed, store, progress)
    log.info("%d programs ready, %d of them compiled now", len(table), compiled)
    return table


def make_params(flags: ServeFlags, plan: Plan, report: Callable[[str, int, int], None]) -> Any:
    """The weights on the devices: from the checkpoint, or random under `--load-format dummy`."""
    dtype = plan.engine_config.dtype
    if flags.load_format == "dummy":
        return random_params(plan.family, plan.cfg, plan.mesh, dtype, flags.seed)
    bar = _Bar("weights")

    def progress(done_bytes: int, total_bytes: int) -> None:
        bar.show(done_bytes, total_bytes, f"{done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB")
        report("weights", done_bytes, total_bytes)

    return load_params(
        plan.checkpoint.folder, plan.family, plan.cfg, plan.mesh, dtype, progress=progress
    )


class _Bar:
    """A progress bar on a terminal; elsewhere a log line at the end and now and then before."""

    _QUIET_S = 5.0

    def __init__(self, title: str) -> None:
        self._title = title
        self._terminal = sys.stderr.isatty()
        self._logged_s = time.monotonic()

    def show(self, done: int, total: int, text: str) -> None:
        share = done / max(total, 1)
        if self._terminal:
            filled = int(share * 24)
            line = f"{self._title} [{'#' * filled}{'.' * (24 - filled)}] {text}"
            sys.stderr.write(f"\r\x1b[2K{line}" + ("\n" if done >= total else ""))
            sys.stderr.flush()
        elif done >= total or time.monotonic() - self._logged_s > self._QUIET_S:
            self._logged_s = time.monotonic()
            log.info("%s %d %%: %s", self._title, round(share * 100), text)


class _CompileCounter:
    """Counts backend compilations of the whole process from its creation on."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, *_: Any, **__: Any) -> None:
        self.count += event == self._EVENT


def load(flags: ServeFlags, plan: Plan, state: ServerState) -> LoadedModel:
    """Everything between the plan and the first request; runs in the loading thread.

    Args:
        flags: what the operator gave.
        plan: `make_plan(flags)`.
        state: told how far it is.

    Raises:
        TpuVlError: the checkpoint does not load or a program does not compile.
    """
    begun = time.monotonic()
    tokenizer = Tokenizer(plan.checkpoint.folder)
    template = _template(flags, plan)
    params = make_params(flags, plan, state.report)
    table = make_executables(
        plan, None if flags.executables is None else Path(flags.executables), state.report
    )
    client = _engine(plan, table, params)
    counter = _CompileCounter()
    log.info("ready after %.1f s", time.monotonic() - begun)
    return LoadedModel(
        root=plan.checkpoint.name,
        tokenizer=tokenizer,
        template=template,
        capability=plan.capability,
        processor=plan.processor,
        limits=plan.limits,
        client=client,
        max_model_len=plan.engine_config.max_model_len,
        vocab_size=plan.family.vocab_size(plan.cfg),
        max_logit_bias=BIAS_CAPACITY,
        max_stop_token_ids=STOP_CAPACITY,
        max_open_requests=plan.engine_config.max_num_seqs + plan.engine_config.max_num_queued_reqs,
        page_size=plan.engine_config.page_size,
        num_pages=plan.engine_config.num_pages,
        compiles_after_ready=lambda: counter.count,
        close=client.shutdown,
    )


def _engine(plan: Plan, table: Mapping[str, jax.stages.Compiled], params: Any) -> EngineClient:
    """The engine with its fresh state, not yet started, behind its client."""
    state = table[ZEROS]()
    runner = Runner(table, params, plan.family.head(params), state)
    has_media = bool(plan.capability.modalities)
    engine = Engine(
        runner,
        plan.engine_config,
        geometry=plan.family.geometry(plan.cfg) if has_media else None,
        vocab_size=plan.family.vocab_size(plan.cfg),
    )
    return EngineClient(EngineThread(engine), plan.engine_config)


def _template(flags: ServeFlags, plan: Plan) -> ChatTemplate:
    if flags.chat_template is None:
        return ChatTemplate.from_folder(plan.checkpoint.folder)
    try:
        return ChatTemplate(Path(flags.chat_template).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--chat-template {flags.chat_template}: {error.strerror}") from error
