"""From flags to a model that answers: the one place where all parts are wired, in order.

Checkpoint and family, what is served, sizes, programs, weights, executables, engine. Nothing large
is read or compiled before the sizes are known to fit each other.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tpu_vl import defaults, demo
from tpu_vl.chat.template import ChatTemplate
from tpu_vl.chat.tokenizer import Tokenizer
from tpu_vl.checkpoint import open_checkpoint, processor_config
from tpu_vl.config import MediaLimits, ProcessorConfig, ServerConfig
from tpu_vl.engine.client import EngineClient
from tpu_vl.engine.engine import Engine, EngineThread
from tpu_vl.engine.layout import BIAS_CAPACITY, STOP_CAPACITY
from tpu_vl.engine.runner import Runner
from tpu_vl.errors import ConfigError
from tpu_vl.flags import ServeFlags
from tpu_vl.mesh import make_mesh
from tpu_vl.precompile.executables import Store
from tpu_vl.precompile.programs import ZEROS
from tpu_vl.prepare import make_executables
from tpu_vl.progress import Bar
from tpu_vl.server.state import LoadedModel, ServerState
from tpu_vl.sized import SizedModel, describe_sizes, size_model
from tpu_vl.weights.load import load_params
from tpu_vl.weights.random import random_params

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan(SizedModel):
    """What will run, decided before a weight is read.

    Args:
        processor: patch rules under the limits; None in a text-only process.
        limits: what is accepted as media.
    """

    processor: ProcessorConfig | None
    limits: MediaLimits


def make_plan(flags: ServeFlags) -> Plan:
    """Reads the checkpoint's JSON files and decides every size.

    Raises:
        ConfigError: the checkpoint, the flags and the machine do not fit; names the remedy.
    """
    checkpoint = open_checkpoint(
        flags.model, revision=flags.revision, download_dir=flags.download_dir
    )
    model = size_model(flags, checkpoint, make_mesh(flags.tensor_parallel_size))
    engine_config = dataclasses.replace(
        model.engine_config, max_num_queued_reqs=flags.max_num_queued_reqs
    )
    has_media = bool(model.capability.modalities)
    limits = defaults.media_limits(flags, model.max_frame_patches)
    processor = None
    if has_media:
        processor = defaults.fit_processor(processor_config(checkpoint), flags, limits)
    return Plan(
        checkpoint=checkpoint,
        family=model.family,
        cfg=model.cfg,
        capability=model.capability,
        mesh=model.mesh,
        engine_config=engine_config,
        processor=processor,
        limits=limits,
    )


def describe(plan: Plan) -> list[str]:
    """The limits that the server will hold to, one line each, printed at start."""
    lines = describe_sizes(plan)
    if plan.processor is not None:
        cell = plan.processor.factor**2
        lines.append(
            f"pictures of {plan.processor.image_min_pixels // cell} to "
            f"{plan.processor.image_max_pixels // cell} tokens; at most "
            f"{plan.limits.max_images} pictures and {plan.limits.max_videos} videos a request; "
            f"{plan.engine_config.pool_rows} media rows on the device"
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


def make_params(flags: ServeFlags, plan: Plan, report: Callable[[str, int, int], None]) -> Any:
    """The weights on the devices: from the checkpoint, or random under `--load-format dummy`."""
    dtype = plan.engine_config.dtype
    if flags.load_format == "dummy":
        return random_params(plan.family, plan.cfg, plan.mesh, dtype, flags.seed)
    bar = Bar("weights")

    def progress(done_bytes: int, total_bytes: int) -> None:
        bar.show(done_bytes, total_bytes, f"{done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB")
        report("weights", done_bytes, total_bytes)

    return load_params(
        plan.checkpoint.folder, plan.family, plan.cfg, plan.mesh, dtype, progress=progress
    )


class _CompileCounter:
    """Counts backend compilations of the whole process from its creation on."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, *_: Any, **__: Any) -> None:
        self.count += event == self._EVENT


def load(flags: ServeFlags, plan: Plan, store: Store | None, state: ServerState) -> LoadedModel:
    """Everything between the plan and the first request; runs in the loading thread.

    Args:
        flags: what the operator gave.
        plan: `make_plan(flags)`.
        store: `prepare.open_store(plan, flags)`.
        state: told how far it is.

    Raises:
        TpuVlError: the checkpoint does not load or a program does not compile.
    """
    begun = time.monotonic()
    tokenizer = Tokenizer(plan.checkpoint.folder)
    template = _template(flags, plan)
    params = make_params(flags, plan, state.report)
    table = make_executables(plan, store, state.report, may_compile=not flags.require_executables)
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
