"""From flags to a plan: by formula, and with what the compiler measured."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tpu_vl import defaults, sized
from tpu_vl.checkpoint import Checkpoint, processor_config
from tpu_vl.config import EngineConfig, MediaLimits
from tpu_vl.flags import SizeFlags
from tpu_vl.kernels.chips import CHIPS, Chip, chip_of
from tpu_vl.mesh import make_mesh
from tpu_vl.models.registry import FAMILIES
from tpu_vl.precompile import buckets, footprint, sketch, traffic
from tpu_vl.precompile import plan as plans
from tpu_vl.precompile.compile import Progress, compile_all
from tpu_vl.precompile.estimate import TowerMode
from tpu_vl.precompile.fusions import Fusion, flagged_fusions
from tpu_vl.precompile.plan import Plan
from tpu_vl.precompile.program_sizes import ProgramSize, program_sizes
from tpu_vl.precompile.programs import Program, make_backend
from tpu_vl.precompile.sizes import ModelSizes, model_sizes
from tpu_vl.precompile.targets import Target, describe_devices
from tpu_vl.progress import Bar
from tpu_vl.sized import SizedModel

TEXT_TOKENS = 128
"""Of a request's context, kept for its text, a video's time stamps and the answer."""

NO_CODE = "no serving code for this model type yet: formula only"


@dataclass(frozen=True)
class NamedDevice:
    """A device that is only spoken of: enough for shardings and sizes, nothing runs on it.

    Args:
        platform, device_kind, id, process_index: as of a jax device.
    """

    platform: str
    device_kind: str
    id: int
    process_index: int = 0


def name_devices(target: Target) -> list[NamedDevice]:
    """The devices of a slice by name; libtpu is not asked."""
    chip = CHIPS[target.machine.chip]
    return [NamedDevice("tpu", chip.kind, i) for i in range(num_devices(target))]


def num_devices(target: Target) -> int:
    """JAX devices of a slice."""
    return target.num_chips * CHIPS[target.machine.chip].devices_per_chip


def has_code(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of a model type that is served, not only planned for."""
    model_type = checkpoint.config.get("model_type")
    return any(model_type in family.model_types for family in FAMILIES)


def formula_plan(flags: SizeFlags, checkpoint: Checkpoint, target: Target) -> Plan:
    """The plan by formula: nothing is compiled and no device is looked for.

    Args:
        flags: what decides the sizes.
        checkpoint: its JSON files.
        target: the slice.

    Raises:
        ConfigError: sizes that contradict each other, or more devices than the slice has.
    """
    mesh = make_mesh(flags.tensor_parallel_size, name_devices(target))
    if has_code(checkpoint):
        return plan_of(sized.size_model(flags, checkpoint, mesh), flags, str(target))
    return _sketched(flags, checkpoint, target)


def does_fit(flags: SizeFlags, checkpoint: Checkpoint, target: Target) -> bool:
    """Whether `formula_plan` of the same would fit; its times are not computed.

    Raises:
        ConfigError: as `formula_plan`.
    """
    chip = CHIPS[target.machine.chip]
    if has_code(checkpoint):
        mesh = make_mesh(flags.tensor_parallel_size, name_devices(target))
        memory = _footprint(sized.size_model(flags, checkpoint, mesh))
    else:
        memory = _sketched_memory(flags, model_sizes(checkpoint.config), chip)[1]
    return plans.fits(memory, chip, flags.hbm_utilization)


def _footprint(model: SizedModel) -> footprint.Footprint:
    e = model.engine_config
    return footprint.footprint(model.family, model.cfg, e, make_backend(model.mesh, e))


def plan_of(
    model: SizedModel,
    flags: SizeFlags,
    target: str,
    request_patches: int = MediaLimits().max_request_patches,
) -> Plan:
    """The plan of a sized model by formula.

    Args:
        model: on real, described or named TPUs.
        flags: what decided the sizes.
        target: what to call the devices.
        request_patches: limit on all media of a request.
    """
    e = model.engine_config
    chip = chip_of(model.mesh.devices.flat[0].device_kind)
    bins = model.family.geometry(model.cfg).num_bins if e.modalities else 1
    mode: TowerMode = "data" if bins > 1 else "weights"
    return _assemble(
        model_sizes(model.checkpoint.config),
        e,
        chip,
        flags,
        name=model.checkpoint.name,
        target=target,
        memory=_footprint(model),
        programs=program_sizes(footprint.model_shape(model.family, model.cfg, model.mesh), e),
        mode=mode,
        video_patches=_video_patches(flags, model.checkpoint, e, request_patches),
        padding=_padding(model, flags),
    )


def _assemble(
    sizes: ModelSizes,
    e: EngineConfig,
    chip: Chip,
    flags: SizeFlags,
    *,
    name: str,
    target: str,
    memory: footprint.Footprint,
    programs: Mapping[str, ProgramSize],
    mode: TowerMode,
    video_patches: int,
    padding: Mapping[str, float] = MappingProxyType({}),
    notes: tuple[str, ...] = (),
) -> Plan:
    n = e.tensor_parallel_size
    kv_tokens = e.num_pages * e.page_size
    contexts = plans.decode_contexts(kv_tokens, e.max_model_len)
    decode, prefill = plans.step_times(
        sizes.decoder, chip, n, e.token_capacities, e.max_num_seqs, contexts
    )
    tower = sizes.tower if e.modalities else None
    top = e.patch_capacities[-1] if e.modalities else 0
    return Plan(
        model=name,
        target=target,
        notes=notes,
        chip=chip,
        num_devices=n,
        dtype=e.dtype,
        footprint=memory,
        utilization=flags.hbm_utilization,
        kv_tokens=kv_tokens,
        max_model_len=e.max_model_len,
        programs=programs,
        is_compiled=False,
        padding_share=padding,
        decode=decode,
        prefill=prefill,
        tower=plans.tower_times(tower, chip, n, mode, e.row_block, top),
        decode_context=contexts,
        video_patches_max=video_patches,
    )


def _padding(model: SizedModel, flags: SizeFlags) -> dict[str, float]:
    """Padding of the tower over the stated distributions of sizes."""
    e = model.engine_config
    if not e.modalities:
        return {}
    geometry, rules = model.family.geometry(model.cfg), processor_config(model.checkpoint)
    ladder = defaults.patch_plan(flags, geometry, model.mesh, e.modalities, rules)
    limits = MediaLimits(max_frame_patches=ladder.max_frame_patches)
    processor = defaults.fit_processor(rules, flags, limits)
    served = {
        name: [one for one in sent if one.kind in e.modalities]
        for name, sent in traffic.DISTRIBUTIONS.items()
    }
    return {
        name: buckets.padding_share(sent, ladder, processor, e.vision_attention_patches).all
        for name, sent in served.items()
        if sent
    }


def _video_patches(
    flags: SizeFlags, checkpoint: Checkpoint, e: EngineConfig, request_patches: int
) -> int:
    if "video" not in e.modalities:
        return 0
    limits = MediaLimits(max_frame_patches=e.patch_capacities[-1])
    processor = defaults.fit_processor(processor_config(checkpoint), flags, limits)
    return plans.video_patches_max(
        request_patches=request_patches,
        video_pixels=processor.video_max_pixels,
        patch_pixels=processor.patch_size**2 * processor.temporal_patch_size,
        merge_cells=processor.merge_size**2,
        max_model_len=e.max_model_len,
        overhead_tokens=TEXT_TOKENS,
    )


def compiled_plan(plan: Plan, flags: SizeFlags, checkpoint: Checkpoint, target: Target) -> Plan:
    """The plan with the compiler's own temporaries, code and seconds, where there is code.

    Args:
        plan: `formula_plan(flags, checkpoint, target)`.
        flags, checkpoint, target: what it was made of.

    Raises:
        ConfigError: the TPU compiler is not installed.
    """
    if not has_code(checkpoint):
        return plan
    mesh = make_mesh(flags.tensor_parallel_size, describe_devices(target))
    listed = sized.list_programs(sized.size_model(flags, checkpoint, mesh))
    expected_s = {name: size.compile_s for name, size in plan.programs.items()}
    bar, seconds = Bar("programs"), {}

    def progress(p: Progress) -> None:
        seconds[p.name] = round(p.seconds, 1)
        text = f"{p.name} compiled in {p.seconds:.1f} s, about {p.remaining_s:.0f} s left"
        bar.show(p.done, p.total, text)

    table = compile_all(listed, None, progress, expected_s=expected_s)
    programs = {
        p.name: ProgramSize(
            temporaries=temporary_bytes(p, table[p.name].memory_analysis()),
            code=code_bytes(table[p.name].memory_analysis()),
            compile_s=seconds[p.name],
        )
        for p in listed
    }
    flagged = [
        f"{p.name}: {flagged_line(fusion)}"
        for p in listed
        for fusion in flagged_fusions(table[p.name].as_text() or "", plan.chip)
    ]
    return dataclasses.replace(
        plan,
        footprint=plan.footprint.with_programs(programs),
        formula=plan.footprint,
        programs=programs,
        is_compiled=True,
        flagged_fusions=tuple(flagged),
    )


def temporary_bytes(program: Program, analysis: Any) -> int:
    """What a program takes beside its arguments, from the compiler's analysis of it.

    Results that replace no argument count; those of a program without arguments are the state.
    """
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + (max(fresh, 0) if program.arguments else 0)


def code_bytes(analysis: Any) -> int:
    """What a program's executable takes of the device's memory."""
    return analysis.generated_code_size_in_bytes


def flagged_line(fusion: Fusion) -> str:
    """A flagged fusion, with those like it in other layers, as one line."""
    ratio = fusion.cycles / fusion.roofline_cycles
    return (
        f"{fusion.count} x {fusion.scope or fusion.name}: {ratio:.2f} times the roofline, "
        f"{fusion.share:.1%} of the program's cycles: {fusion.reason or 'no reason known'}"
    )


def _sketched(flags: SizeFlags, checkpoint: Checkpoint, target: Target) -> Plan:
    """The plan of a model type without serving code."""
    sizes, chip = model_sizes(checkpoint.config), CHIPS[target.machine.chip]
    e, memory = _sketched_memory(flags, sizes, chip)
    notes = [NO_CODE]
    narrow = "int8" if chip.int8_ops else "float8" if chip.fp8_flops else None
    if narrow is not None:
        e8, memory8 = _sketched_memory(flags, sizes, chip, layer_value_bytes=1)
        if plans.fits(memory8, chip, flags.hbm_utilization):
            verdict = f"fit, with {e8.num_pages * e8.page_size} tokens of KV pages"
        else:
            verdict = f"not fit: {memory8.total / 2**30:.1f} GiB a device"
        notes.append(f"{narrow} weights of layers and experts would {verdict}")
    return _assemble(
        sizes,
        e,
        chip,
        flags,
        name=checkpoint.name,
        target=str(target),
        memory=memory,
        programs=program_sizes(sketch.model_shape(sizes, flags.tensor_parallel_size), e),
        mode="weights",
        video_patches=_video_patches(flags, checkpoint, e, MediaLimits().max_request_patches),
        notes=tuple(notes),
    )


def _sketched_memory(
    flags: SizeFlags, sizes: ModelSizes, chip: Chip, layer_value_bytes: int = 2
) -> tuple[EngineConfig, footprint.Footprint]:
    smallest = _sketched_config(flags, sizes)
    held = sketch.footprint(sizes, smallest, layer_value_bytes)
    page = sketch.page_bytes(sizes, smallest)
    e = footprint.with_pages(smallest, held, page, chip.hbm_bytes * flags.hbm_utilization)
    return e, sketch.footprint(sizes, e, layer_value_bytes)


def _sketched_config(flags: SizeFlags, sizes: ModelSizes) -> EngineConfig:
    """The sizes of a served model with the same flags, one longest sequence of pages."""
    tpu, tower, n = defaults.PLATFORMS["tpu"], sizes.tower, flags.tensor_parallel_size
    num_seqs = flags.max_num_seqs or tpu.max_num_seqs
    num_tokens = flags.max_num_batched_tokens or max(tpu.max_num_batched_tokens, num_seqs)
    max_model_len = flags.max_model_len or min(tpu.max_model_len, sizes.max_positions)
    page_size = flags.block_size or tpu.page_size
    vision: dict[str, Any] = {}
    if tower is not None and not flags.text_model_only and flags.mm_disable is None:
        merge = round(tower.merge_cells**0.5)
        top = flags.max_frame_patches or tpu.max_frame_patches
        ladder = buckets.patch_plan(top, tpu.row_block, n, merge, row_steps=tpu.row_steps)
        rows = ladder.max_frame_patches // tower.merge_cells
        vision = {
            "patch_capacities": ladder.capacities,
            "row_block": ladder.row_block,
            "row_steps": ladder.row_steps,
            "pool_rows": 2 * rows + num_tokens,
            "modalities": ("image", "video"),
        }
    return EngineConfig(
        dtype="bfloat16",
        tensor_parallel_size=n,
        max_model_len=max_model_len,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        page_size=page_size,
        num_pages=-(-max_model_len // page_size),
        token_capacities=buckets.token_capacities(num_tokens, num_seqs),
        **vision,
    )
