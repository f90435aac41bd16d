"""A model with every size decided, from its JSON files, the flags and the devices alone."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from tpu_vl import defaults
from tpu_vl.checkpoint import Checkpoint, processor_config
from tpu_vl.config import EngineConfig
from tpu_vl.flags import SizeFlags
from tpu_vl.mesh import model_size
from tpu_vl.models.family import Family, check_family
from tpu_vl.models.registry import family_of
from tpu_vl.precompile import footprint
from tpu_vl.precompile.program_sizes import program_sizes
from tpu_vl.precompile.programs import Program, make_backend, programs
from tpu_vl.server.state import Capability


@dataclass(frozen=True, kw_only=True)
class SizedModel:
    """What decides every program.

    Args:
        checkpoint, family, cfg: the model; `cfg.vision` is None where no media are served.
        capability: served modalities.
        mesh: the devices, real or described.
        engine_config: every size.
    """

    checkpoint: Checkpoint
    family: Family
    cfg: Any
    capability: Capability
    mesh: Mesh
    engine_config: EngineConfig

    @property
    def max_frame_patches(self) -> int:
        """Patches of the largest picture or video frame; 0 in a text-only process."""
        if not self.engine_config.modalities:
            return 0
        return self.engine_config.patch_capacities[-1] // self.family.geometry(self.cfg).num_bins


def capability_of(family: Family, checkpoint: Checkpoint, flags: SizeFlags) -> Capability:
    """Served modalities: registered by the family, in the checkpoint, not disabled.

    One row of the registry and the flags decide; front end and engine read the result only.
    """
    reasons: dict[str, str] = {}
    counts = defaults.media_counts(flags)
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


def size_model(flags: SizeFlags, checkpoint: Checkpoint, mesh: Mesh) -> SizedModel:
    """Decides what is served and every size.

    Raises:
        ConfigError: the checkpoint, the flags and the devices do not fit; names the remedy.
    """
    family = family_of(dict(checkpoint.config))
    check_family(family)
    capability = capability_of(family, checkpoint, flags)
    cfg = family.parse_config(
        dict(checkpoint.config),
        with_vision=bool(capability.modalities),
        preprocessor=checkpoint.preprocessor,
    )
    processor, mode = processor_config(checkpoint), "weights"
    if capability.modalities:
        mode = defaults.tower_mode(flags, family, cfg, mesh, processor)
    cfg = family.shard(cfg, model_size(mesh), mode)
    return SizedModel(
        checkpoint=checkpoint,
        family=family,
        cfg=cfg,
        capability=capability,
        mesh=mesh,
        engine_config=defaults.engine_config(
            flags,
            family,
            cfg,
            mesh,
            capability.modalities,
            checkpoint.max_positions(),
            processor,
        ),
    )


def list_programs(model: SizedModel) -> tuple[Program, ...]:
    """Every program of the model."""
    backend = make_backend(model.mesh, model.engine_config)
    return programs(model.family, model.cfg, model.engine_config, backend)


def compile_seconds(model: SizedModel) -> dict[str, float]:
    """Processor seconds that each program will take to compile, by name; see `program_sizes`."""
    shape = footprint.model_shape(model.family, model.cfg, model.mesh)
    sizes = program_sizes(shape, model.engine_config)
    return {name: size.compile_s for name, size in sizes.items()}


def describe_sizes(model: SizedModel) -> list[str]:
    """The devices and the sizes, one line each, printed at start."""
    e, device = model.engine_config, model.mesh.devices.flat[0]
    return [
        f"model {model.checkpoint.name} ({model.family.name}), {e.dtype}, "
        f"{e.tensor_parallel_size} x {device.device_kind} ({device.platform})",
        f"serves text{''.join(f', {m}' for m in model.capability.modalities)}; context "
        f"{e.max_model_len} tokens; {e.max_num_seqs} sequences at once; "
        f"{e.max_num_batched_tokens} tokens a step",
        f"KV cache {e.num_pages} pages of {e.page_size} tokens",
    ]
