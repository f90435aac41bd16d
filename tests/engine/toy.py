"""A family whose answers are a hash of all that the engine keeps, with a pure Python oracle.

Every token's feature mixes its id, its three positions and its pool row; it is written to its KV
page; the next token is a hash over the features of the whole sequence in order. So one wrong id,
position, page, pool row, chunk border or tower layer changes the answer. All values are small
integers in float32: exact, whatever the batch.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_vl.config import EngineConfig
from tpu_vl.engine import layout
from tpu_vl.engine.engine import Engine
from tpu_vl.engine.messages import AddRequest, Media, Output, Sampling
from tpu_vl.engine.runner import Runner
from tpu_vl.mesh import make_mesh, replicated
from tpu_vl.models.family import Backend, Family, PagedCache, VisionGeometry
from tpu_vl.precompile.programs import ZEROS, programs
from tpu_vl.tree import pytree
from tpu_vl.vision.positions import interpolation_tables, mrope_positions, patch_coords

VOCAB, IMAGE, VIDEO, START, END = 61, 50, 51, 52, 53
DEPTH, LEVELS, WIDTH, TEXT_WIDTH, MERGE = 5, 1, 2, 4, 2
GEOMETRY = VisionGeometry(
    patch_size=1,
    temporal_patch_size=1,
    merge_size=MERGE,
    patch_width=3,
    position_side=4,
    depth=DEPTH,
    width=WIDTH,
    num_levels=LEVELS,
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    vision_end_token_id=END,
)


@pytree
class ToyText:
    """A small integer per token id, as float32."""

    embed_V: jax.Array


@pytree
class ToyTower:
    """What each layer adds, as float32."""

    step_C: jax.Array


@pytree
class ToyParams:
    """`vision` is None in a text-only process."""

    text: ToyText
    vision: ToyTower | None


@dataclass(frozen=True)
class ToyConfig:
    """`vision` is None in a text-only process."""

    vision: VisionGeometry | None


def text_step(params, caches, pool_RJD, inputs, *, cfg, backend):
    del cfg, backend
    (pages_LSCH,) = caches
    num_tokens, page_size = inputs.ids_T.shape[0], pages_LSCH.shape[1]
    token_T = jnp.arange(num_tokens)
    seq_T = jnp.searchsorted(inputs.q_starts_B[1:], token_T, side="right")
    seq_T = jnp.minimum(seq_T, inputs.kv_lens_B.shape[0] - 1)
    past_B = inputs.kv_lens_B - (inputs.q_starts_B[1:] - inputs.q_starts_B[:-1])
    place_T = past_B[seq_T] + token_T - inputs.q_starts_B[seq_T]
    positions = jnp.broadcast_to(inputs.positions_XT, (3, num_tokens))
    cell_T = jnp.zeros(num_tokens)
    if pool_RJD is not None:
        row_TJD = pool_RJD[jnp.maximum(inputs.pool_row_T, 0)]
        cell_T = jnp.where(inputs.pool_row_T >= 0, row_TJD[:, 0, 0] + 2 * row_TJD[:, 1, 3], 0)
    feature_T = params.embed_V[inputs.ids_T] + jnp.asarray([3, 5, 7]) @ positions + 11 * cell_T
    feature_T = jnp.mod(feature_T, 97)
    page_T = inputs.page_table_BL[seq_T, place_T // page_size]
    page_T = jnp.where(token_T < inputs.q_starts_B[-1], page_T, pages_LSCH.shape[0])
    pages_LSCH = pages_LSCH.at[page_T, place_T % page_size, 0, 0].set(feature_T, mode="drop")
    seq_R = seq_T[inputs.row_tokens_R]
    known_RI = pages_LSCH[inputs.page_table_BL[seq_R], :, 0, 0].reshape(len(seq_R), -1)
    index_I = jnp.arange(known_RI.shape[1])
    weight_I = (index_I * index_I + 3 * index_I + 1) % 11 + 1
    seen_RI = index_I <= place_T[inputs.row_tokens_R][:, None]
    total_R = jnp.sum(jnp.where(seen_RI, known_RI * weight_I, 0), axis=-1)
    return jnp.tile(total_R[:, None], (1, TEXT_WIDTH)), (pages_LSCH,)


def logits(head, hidden_RD, *, cfg, backend):
    del cfg, backend
    v = jnp.arange(VOCAB)
    return jnp.mod(head + 13 * v + hidden_RD[:, :1] * (v % 7 + 1), 101) / 16


def encode_step(params, pool_RJD, hidden_PD, inputs, *, cfg, backend):
    del cfg, backend
    colour_P = jnp.sum(inputs.patches_PW.astype(jnp.float32), axis=1)
    place_P = 2 * inputs.coords_2P[0] + 3 * inputs.coords_2P[1]
    grid_P = jnp.round(jnp.sum(inputs.interp_index_4P * inputs.interp_weight_4P, axis=0) * 4)
    start_P = jnp.mod(colour_P + 5 * colour_P[inputs.bounds_2P[0]] + place_P + grid_P, 251)
    first, end = inputs.layers_2[0], inputs.layers_2[1]
    hidden_P = jnp.where(first == 0, start_P, hidden_PD[:, 0])
    hidden_P = jax.lax.fori_loop(
        first, end, lambda i, h: jnp.mod(3 * h + params.step_C[0] * (i + 1), 251), hidden_P
    )
    cell_M = hidden_P.reshape(-1, MERGE**2).sum(axis=1)
    row_M = jnp.where(
        (end == DEPTH)
        & (inputs.rows_M >= 0)
        & (jnp.arange(cell_M.size) * MERGE**2 < inputs.num_patches_X),
        inputs.rows_M,
        pool_RJD.shape[0],
    )
    rows_MJD = jnp.stack([cell_M, jnp.mod(cell_M, 17)], axis=1)[:, :, None]
    rows_MJD = jnp.broadcast_to(rows_MJD, (cell_M.size, 1 + LEVELS, TEXT_WIDTH))
    pool_RJD = pool_RJD.at[row_M].set(rows_MJD, mode="drop")
    return pool_RJD, jnp.tile(hidden_P[:, None], (1, WIDTH))


def _unused(*_: Any, **__: Any) -> Any:
    raise AssertionError("the engine does not ask a family for this")


FAMILY = Family(
    name="toy",
    model_types=("toy",),
    modalities=("image", "video"),
    parse_config=_unused,
    shard=_unused,
    dims=_unused,
    abstract_params=lambda cfg, _: jax.eval_shape(lambda: make_params(cfg)),
    axes=lambda _: {"text": {}, "vision": {}},
    checkpoint_map=_unused,
    key_prefixes=(),
    skip_keys=lambda _: (),
    caches=lambda _: (PagedCache("kv", 1, 1, 8),),
    encoders={"vision": encode_step},
    geometry=lambda cfg: cfg.vision,
    text_step=text_step,
    head=lambda params: params.text.embed_V,
    logits=logits,
    vocab_size=lambda _: VOCAB,
    logits_width=lambda _: VOCAB,
    text_width=lambda _: TEXT_WIDTH,
)
EMBEDDING = np.random.default_rng(1).integers(0, 97, VOCAB).astype(np.float32)


def make_params(cfg: ToyConfig) -> ToyParams:
    """The toy's weights."""
    tower = ToyTower(step_C=jnp.asarray([7.0])) if cfg.vision else None
    return ToyParams(text=ToyText(embed_V=jnp.asarray(EMBEDDING)), vision=tower)


CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=200,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    max_num_queued_reqs=64,
    page_size=8,
    num_pages=400,
    token_capacities=(16, 64),
    patch_capacities=(16, 64, 256),
    pool_rows=256,
    vision_step_patch_layers=1_000_000,
    row_block=8,
    modalities=("image", "video"),
)
TIGHT = replace(CONFIG, num_pages=26, pool_rows=16, token_capacities=(64,))
TEXT_ONLY = replace(
    CONFIG, patch_capacities=(), pool_rows=0, vision_step_patch_layers=0, modalities=()
)


FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compiled(config: EngineConfig, name: str) -> Any:
    """One executable of a config; configs that differ in step limits only share it."""
    kind, _, size = name.partition("/")
    num_tokens = int(size) if kind == "text" else config.max_num_seqs
    return _compiled(
        replace(
            config,
            vision_step_patch_layers=1,
            max_num_queued_reqs=1,
            max_num_batched_tokens=max(num_tokens, config.max_num_seqs),
            token_capacities=tuple({num_tokens: 0, max(num_tokens, config.max_num_seqs): 0}),
        ),
        name,
    )


@cache
def _compiled(config: EngineConfig, name: str) -> Any:
    mesh = make_mesh(config.tensor_parallel_size)
    backend = Backend(mesh, "blocked", "blocked", config.row_block)
    (program,) = [p for p in programs(FAMILY, _cfg(config), config, backend) if p.name == name]
    placed = jax.tree.map(lambda a: a.sharding, program.outputs)
    jitted = jax.jit(program.function, donate_argnums=program.donate, out_shardings=placed)
    return jitted.lower(*program.arguments).compile(FAST_COMPILE)


def _cfg(config: EngineConfig) -> ToyConfig:
    return ToyConfig(GEOMETRY if config.modalities else None)


def make_runner(config: EngineConfig, without: str | None = None) -> Runner:
    """A runner with a fresh state; `without` names a program to leave out of its table."""
    names = [layout.text_name(t) for t in config.token_capacities]
    names += [layout.sample_name(r) for r in layout.sample_capacities(config)]
    names += [layout.encode_name(p) for p in config.patch_capacities]
    whole = replicated(make_mesh(config.tensor_parallel_size))
    params = jax.device_put(make_params(_cfg(config)), whole)
    table = {name: compiled(config, name) for name in names if name != without}
    return Runner(table, params, FAMILY.head(params), compiled(config, ZEROS)())


def make_engine(config: EngineConfig = CONFIG, runner: Runner | None = None) -> Engine:
    """An engine over the toy family."""
    return Engine(
        runner or make_runner(config),
        config,
        geometry=GEOMETRY if config.modalities else None,
        vocab_size=VOCAB,
    )


def medium(seed: int, t: int, h: int, w: int, kind: str = "image") -> dict[str, Any]:
    """Random patches of a grid, with the digest that its content has in these tests."""
    patches = np.random.default_rng(seed).integers(0, 256, (t * h * w, 3), np.uint8)
    return {"kind": kind, "digest": bytes([seed, t, h, w]) * 8, "thw": (t, h, w), "px": patches}


def request(
    request_id: str, parts: list[Any], *, media: bool = True, **sampling: Any
) -> AddRequest:
    """A request of token-id lists and media, in order; positions as Qwen3-VL counts them."""
    ids: list[int] = []
    found, frames = [], []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        t, h, w = part["thw"]
        starts = []
        for _ in range(t):
            ids.append(START)
            starts.append(len(ids))
            frames.append((len(ids), h, w))
            ids += [IMAGE if part["kind"] == "image" else VIDEO] * (h * w // MERGE**2)
            ids.append(END)
        found.append(
            Media(
                kind=part["kind"],
                digest=part["digest"],
                grid_thw=part["thw"],
                patches=part["px"].tobytes(),
                starts=tuple(starts),
            )
        )
    positions, delta = mrope_positions(len(ids), frames, MERGE)
    return AddRequest(
        request_id=request_id,
        token_ids=np.asarray(ids, np.int32).tobytes(),
        positions=positions.tobytes() if media else b"",
        position_delta=delta,
        media=tuple(found),
        sampling=Sampling(**{"max_tokens": 8, "temperature": 0.0, **sampling}),
    )


def run(
    engine: Engine, messages: list[Any], *, per_step: int = 1000, max_steps: int = 3000
) -> dict[str, list[Output]]:
    """Feeds messages, `per_step` before each step, and steps until idle; checks after each."""
    outputs: dict[str, list[Output]] = {}
    todo = list(messages)
    for _ in range(max_steps):
        emitted = []
        for message in todo[:per_step]:
            emitted += engine.handle(message)
        del todo[:per_step]
        if engine.has_work:
            emitted += engine.step()
        engine.scheduler.check_integrity()
        for output in emitted:
            outputs.setdefault(output.request_id, []).append(output)
        if not engine.has_work and not todo:
            return outputs
    raise AssertionError(f"{max_steps} steps did not end {engine.open_requests}")


def tokens(outputs: list[Output]) -> list[int]:
    """The answer of one request."""
    assert outputs[-1].finish_reason in ("stop", "length", "abort"), outputs[-1]
    return [t for output in outputs for t in output.token_ids]


def assert_nothing_held(engine: Engine) -> None:
    """All pages, slots and pins are given back."""
    scheduler = engine.scheduler
    assert scheduler.pages.num_free == scheduler.pages.num_pages
    assert scheduler.cache.num_pinned_rows == 0
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.tower.busy
    scheduler.check_integrity()


def chunked(num_tokens: int, **fields: Any) -> EngineConfig:
    """A config whose steps hold `num_tokens` tokens, for few requests."""
    sizes = {"max_num_batched_tokens": num_tokens, "token_capacities": (num_tokens,)}
    return replace(CONFIG, max_num_seqs=4, patch_capacities=(256,), **{**sizes, **fields})


def oracle(message: AddRequest, never: tuple[int, ...] = (IMAGE, VIDEO, START, END)) -> list[int]:
    """The greedy answer by plain Python: no batch, no pages, no chunks, no pool."""
    ids = np.frombuffer(message.token_ids, np.int32).tolist()
    num_prompt = len(ids)
    positions = np.frombuffer(message.positions, np.int32).reshape(3, -1).T.tolist()
    cells = dict.fromkeys(range(num_prompt), 0)
    for m in message.media:
        _, h, w = m.grid_thw
        for i, start in enumerate(m.starts):
            frame = m.patches_PW()[i * h * w : (i + 1) * h * w]
            cells.update(enumerate(_cells(frame, h, w), start))
    answer: list[int] = []
    while True:
        total = 0
        for i, token in enumerate(ids):
            p = positions[i] if i < num_prompt else [i + message.position_delta] * 3
            feature = EMBEDDING[token] + 3 * p[0] + 5 * p[1] + 7 * p[2] + 11 * cells.get(i, 0)
            total += int(feature) % 97 * ((i * i + 3 * i + 1) % 11 + 1)
        v = np.arange(VOCAB)
        scores = (EMBEDDING + 13 * v + total * (v % 7 + 1)) % 101
        scores[list(never)] = -1
        answer.append(int(scores.argmax()))
        ids.append(answer[-1])
        if answer[-1] in message.sampling.stop_token_ids:
            return answer
        if len(answer) == message.sampling.max_tokens:
            return answer


def _cells(patches: np.ndarray, h: int, w: int) -> list[int]:
    colour = patches.astype(np.int64).sum(axis=1)
    rows, columns = patch_coords(h, w, MERGE)
    index, weight = interpolation_tables(h, w, GEOMETRY.position_side, MERGE)
    grid = np.round((index * weight).sum(axis=0) * 4).astype(np.int64)
    hidden = (colour + 5 * colour[0] + 2 * rows + 3 * columns + grid) % 251
    for layer in range(DEPTH):
        hidden = (3 * hidden + 7 * (layer + 1)) % 251
    cell = hidden.reshape(-1, MERGE**2).sum(axis=1)
    return (cell + 2 * (cell % 17)).tolist()
