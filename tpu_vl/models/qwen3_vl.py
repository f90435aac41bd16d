"""Qwen3-VL dense: the language model, its config and the record of the family.

Dims: T packed tokens, D width, N query heads, K kv heads, H head width, F mlp, V vocabulary,
X position axes, R rows; I and E are V and D of the embedding.

Source: transformers 5.24 models/qwen3_vl/modeling_qwen3_vl.py, `Qwen3VLTextModel` and
`Qwen3VLModel`. Deviations: media rows are gathered from the pool by index instead of scattered by
mask, and only the wanted rows reach the final norm.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tpu_vl import tree
from tpu_vl.errors import ConfigError
from tpu_vl.kernels.paged_attention.api import Rope, paged_attention
from tpu_vl.mesh import MODEL, model_size, replicated
from tpu_vl.models import ops, qwen3_vision, qwen3_vision_config, tensor_parallel
from tpu_vl.models.family import (
    Backend,
    EncodeInputs,
    Family,
    PagedCache,
    TensorMap,
    TextInputs,
    VisionGeometry,
)
from tpu_vl.models.qwen3_vision_config import VisionConfig, VisionParams
from tpu_vl.models.qwen3_vl_config import (
    Qwen3VLConfig,
    axes,
    dims,
    parse_config,
    shard,
    text_dims,
)
from tpu_vl.tree import pytree

SHARED_TOKENS = 512
"""Tokens from which the devices share what stands between the layers."""


@pytree
class TextLayer:
    """One decoder layer."""

    input_norm_D: jax.Array
    q_DNH: jax.Array
    k_DKH: jax.Array
    v_DKH: jax.Array
    o_NHD: jax.Array
    q_norm_H: jax.Array
    k_norm_H: jax.Array
    post_norm_D: jax.Array
    gate_DF: jax.Array
    up_DF: jax.Array
    down_FD: jax.Array


@pytree
class TextParams:
    """The language model; `head_VD` is None when the embedding is also the output matrix."""

    embed_IE: jax.Array
    layers: tuple[TextLayer, ...]
    final_norm_D: jax.Array
    head_VD: jax.Array | None


@pytree
class Params:
    """The whole model; `vision` is None in a text-only process."""

    text: TextParams
    vision: VisionParams | None


def abstract_params(cfg: Qwen3VLConfig, dtype: str) -> Params:
    """The tree of jax.ShapeDtypeStruct.

    Raises:
        ConfigError: a dtype other than float32 and bfloat16.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"--dtype {dtype} is not supported (float16 overflows in this family's activations); "
            "use bfloat16 or float32"
        )
    table = dims(cfg)["text"]
    head = None if cfg.tie_word_embeddings else tree.array("head_VD", table, dtype)
    layers = tuple(tree.abstract(TextLayer, table, dtype) for _ in range(cfg.text.num_layers))
    return Params(
        text=tree.abstract(TextParams, table, dtype, layers=layers, head_VD=head),
        vision=None
        if cfg.vision is None
        else qwen3_vision_config.abstract_vision_params(cfg.vision, dtype),
    )


def checkpoint_map(cfg: Qwen3VLConfig) -> tuple[TensorMap, ...]:
    """Where every array is in a checkpoint."""
    model = "model.language_model"
    maps = [
        TensorMap("text.embed_IE", f"{model}.embed_tokens.weight", "IE"),
        TensorMap("text.final_norm_D", f"{model}.norm.weight", "D"),
    ]
    if not cfg.tie_word_embeddings:
        maps.append(TensorMap("text.head_VD", "lm_head.weight", "VD"))
    layer = {
        "input_norm_D": ("input_layernorm.weight", "D"),
        "q_DNH": ("self_attn.q_proj.weight", "(NH)D"),
        "k_DKH": ("self_attn.k_proj.weight", "(KH)D"),
        "v_DKH": ("self_attn.v_proj.weight", "(KH)D"),
        "o_NHD": ("self_attn.o_proj.weight", "D(NH)"),
        "q_norm_H": ("self_attn.q_norm.weight", "H"),
        "k_norm_H": ("self_attn.k_norm.weight", "H"),
        "post_norm_D": ("post_attention_layernorm.weight", "D"),
        "gate_DF": ("mlp.gate_proj.weight", "FD"),
        "up_DF": ("mlp.up_proj.weight", "FD"),
        "down_FD": ("mlp.down_proj.weight", "DF"),
    }
    for i in range(cfg.text.num_layers):
        for name, (key, layout) in layer.items():
            maps.append(TensorMap(f"text.layers.{i}.{name}", f"{model}.layers.{i}.{key}", layout))
    in_file = text_dims(replace(cfg.text, num_shards=1))
    held = tensor_parallel.as_held(maps, in_file, text_dims(cfg.text))
    if cfg.vision is None:
        return held
    return held + qwen3_vision_config.vision_checkpoint_map(cfg.vision)


def skip_keys(cfg: Qwen3VLConfig) -> tuple[str, ...]:
    """Keys that may stay unread: what a tied head or a text-only process does not use."""
    keys = [r".*rotary_emb\.inv_freq", r".*rotary_pos_emb\.inv_freq"]
    if cfg.tie_word_embeddings:
        keys.append(r"lm_head\.weight")
    if cfg.vision is None:
        keys.append(r"model\.visual\..*")
    return tuple(keys)


def geometry(cfg: Qwen3VLConfig) -> VisionGeometry:
    """What the host needs to know of the tower.

    Raises:
        ConfigError: the model was parsed without its vision section.
    """
    if cfg.vision is None or cfg.ids is None:
        raise ConfigError("this model has no vision section: it serves text only")
    vision = cfg.vision
    return VisionGeometry(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.merge_size,
        patch_width=vision.patch_width,
        position_side=vision.position_side,
        depth=vision.depth,
        width=vision.width,
        num_levels=len(vision.tap_layers),
        image_token_id=cfg.ids.image,
        video_token_id=cfg.ids.video,
        vision_start_token_id=cfg.ids.vision_start,
        vision_end_token_id=cfg.ids.vision_end,
        num_bins=vision.num_bins,
    )


def caches(cfg: Qwen3VLConfig) -> tuple[PagedCache, ...]:
    """One paged cache of keys and values over all layers."""
    text = cfg.text
    return (PagedCache("kv", text.num_layers, text_dims(text)["K"], text.head_dim),)


Attend = Callable[[jax.Array, jax.Array, jax.Array, Rope, Any], tuple[jax.Array, Any]]


def text_layers(
    params: TextParams,
    ids_T: jax.Array,
    positions_XT: jax.Array,
    pool_RJD: jax.Array | None,
    pool_row_T: jax.Array | None,
    states: tuple[Any, ...],
    attend: Attend,
    *,
    cfg: Qwen3VLConfig,
    backend: Backend,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Embeds tokens and media rows and runs all decoder layers; pure, for serving and training.

    Args:
        params: the language model.
        ids_T: int32 token ids.
        positions_XT: int32, X = 3 or 1.
        pool_RJD: media rows: the merger's vector, then the DeepStack levels; the last row is zero.
            None: text only.
        pool_row_T: int32 row of each token, -1 for text; None: text only.
        states: one per layer, handed to `attend`.
        attend: (q_TNH, k_TKH, v_TKH, rope, state) -> (out_TNH, new state); queries and keys still
            need the norm and rotation of `rope`.
        cfg, backend: static.

    Returns:
        hidden_TD before the final norm, and the new states.
    """
    text = cfg.text
    x_TD = _embedded(params.embed_IE, ids_T, pool_RJD, pool_row_T)
    x_TD = _residual(x_TD, backend)
    inv_freq = ops.inverse_frequencies(text.head_dim, text.rope_theta)
    axes = ops.interleaved_axes(inv_freq.size, text.rope_sections)
    cos_TH, sin_TH = ops.rope_tables(positions_XT, inv_freq, axes, x_TD.dtype)
    num_levels = 0 if pool_RJD is None else pool_RJD.shape[1] - 1
    new_states = []
    for i, (p, state) in enumerate(zip(params.layers, states, strict=True)):
        with jax.named_scope(f"layer_{i}"):
            x_TD, state = _text_layer(p, x_TD, cos_TH, sin_TH, state, attend, cfg, backend)
            if i < num_levels:
                with jax.named_scope("deepstack"):
                    rows_TD = _media_rows(x_TD, pool_RJD, pool_row_T, 1 + i)
                    x_TD = _residual(x_TD + _residual(rows_TD, backend), backend)
            new_states.append(state)
    return x_TD, tuple(new_states)


def _text_layer(
    p: TextLayer,
    x_TD: jax.Array,
    cos_TH: jax.Array,
    sin_TH: jax.Array,
    state: Any,
    attend: Attend,
    cfg: Qwen3VLConfig,
    backend: Backend,
) -> tuple[jax.Array, Any]:
    eps = cfg.text.norm_eps
    with jax.named_scope("attention"):
        y_TD, scale_T = _normed(x_TD, p.input_norm_D, eps, backend)
        q_TNH = ops.scaled_einsum("td,dnh->tnh", y_TD, p.q_DNH, scale_T)
        k_TKH = ops.scaled_einsum("td,dkh->tkh", y_TD, p.k_DKH, scale_T)
        v_TKH = ops.scaled_einsum("td,dkh->tkh", y_TD, p.v_DKH, scale_T)
        rope = Rope(p.q_norm_H, p.k_norm_H, cos_TH, sin_TH, eps)
        out_TNH, state = attend(q_TNH, k_TKH, v_TKH, rope, state)
        x_TD = _residual(x_TD + _residual(_joined(out_TNH, p.o_NHD, backend), backend), backend)
    with jax.named_scope("mlp"):
        y_TD, scale_T = _normed(x_TD, p.post_norm_D, eps, backend)
        out_TD = ops.gated_mlp(y_TD, scale_T, p.gate_DF, p.up_DF, p.down_FD)
        x_TD = _residual(x_TD + _residual(out_TD, backend), backend)
    return x_TD, state


def _embedded(
    embed_IE: jax.Array, ids_T: jax.Array, pool_RJD: jax.Array | None, pool_row_T: jax.Array | None
) -> jax.Array:
    """Rows of tokens or of media: the sum of both, one of which is zero, takes a pass less than
    the choice between them."""
    x_TD = embed_IE[ids_T]
    if pool_RJD is None or pool_row_T is None:
        return x_TD
    is_text_T1 = (pool_row_T < 0)[:, None].astype(x_TD.dtype)
    return x_TD * is_text_T1 + _media_rows(x_TD, pool_RJD, pool_row_T, 0)


def _media_rows(x_TD: jax.Array, pool_RJD: Any, pool_row_T: Any, column: int) -> jax.Array:
    """The pool's rows; for text the last one, which is zero."""
    row_T = jnp.where(pool_row_T < 0, pool_RJD.shape[0] - 1, pool_row_T)
    return pool_RJD[row_T, column].astype(x_TD.dtype)


def _normed(
    x_TD: jax.Array, weight_D: jax.Array, eps: float, backend: Backend
) -> tuple[jax.Array, jax.Array]:
    """The two factors of a norm, whole on every device."""
    y_TD, scale_T = ops.norm_factors(x_TD, weight_D, eps)
    y_TD = _residual(y_TD, backend)
    return jax.lax.with_sharding_constraint(y_TD, replicated(backend.mesh)), scale_T


def _joined(out_TNH: jax.Array, o_NHD: jax.Array, backend: Backend) -> jax.Array:
    """The output projection as a product of two matrices, for which the reshapes are free."""
    num_heads, width, _ = o_NHD.shape
    out_TQ = out_TNH.reshape(-1, num_heads * width)
    by_heads = NamedSharding(backend.mesh, PartitionSpec(None, MODEL))
    out_TQ = jax.lax.with_sharding_constraint(out_TQ, by_heads)
    with jax.named_scope("output"):
        return out_TQ @ o_NHD.reshape(num_heads * width, -1)


def _residual(x_TD: jax.Array, backend: Backend) -> jax.Array:
    """Places what stands between the layers: whole, or of long batches D over the devices.

    Then norms and sums are shared work, and a reduce-scatter and an all-gather move what one
    all-reduce would; of a short batch only the latency of the collectives counts.
    """
    num_tokens, width = x_TD.shape
    is_shared = num_tokens >= SHARED_TOKENS and width % model_size(backend.mesh) == 0
    spec = PartitionSpec(None, MODEL if is_shared else None)
    return jax.lax.with_sharding_constraint(x_TD, NamedSharding(backend.mesh, spec))


def final_norm(params: TextParams, hidden_RD: jax.Array, *, cfg: Qwen3VLConfig) -> jax.Array:
    """The norm between the last layer and the output matrix."""
    return ops.rms_norm(hidden_RD, params.final_norm_D, cfg.text.norm_eps)


def text_step(
    params: TextParams,
    caches: tuple[jax.Array, ...],
    pool_RJD: jax.Array | None,
    inputs: TextInputs,
    *,
    cfg: Qwen3VLConfig,
    backend: Backend,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Runs the language model over one ragged batch; see `family.TextStep`.

    Args:
        params: the language model.
        caches: KV pages of each layer, [page, slot, 2K, H].
        pool_RJD: media pool; None in a text-only process.
        inputs: the batch.
        cfg, backend: static.

    Returns:
        hidden_RD of `inputs.row_tokens_R` after the final norm, and the caches.
    """

    def attend(
        q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, rope: Rope, pages: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return paged_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            pages,
            inputs.page_table_BL,
            inputs.q_starts_B,
            inputs.kv_lens_B,
            scale=cfg.text.head_dim**-0.5,
            rope=rope,
            implementation=backend.paged_attention,
            mesh=backend.mesh,
        )

    with ops.matmul_precision(params.embed_IE.dtype):
        hidden_TD, caches = text_layers(
            params,
            inputs.ids_T,
            inputs.positions_XT,
            pool_RJD,
            inputs.pool_row_T,
            caches,
            attend,
            cfg=cfg,
            backend=backend,
        )
        return final_norm(params, hidden_TD[inputs.row_tokens_R], cfg=cfg), caches


def encode_step(
    params: VisionParams,
    pool_RJD: jax.Array,
    hidden_PD: jax.Array,
    inputs: EncodeInputs,
    *,
    cfg: Qwen3VLConfig,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """The tower's step under the config of the whole model; see `qwen3_vision.encode_step`."""
    return qwen3_vision.encode_step(
        params, pool_RJD, hidden_PD, inputs, cfg=_vision(cfg), backend=backend
    )


def tower(
    params: VisionParams, inputs: EncodeInputs, *, cfg: Qwen3VLConfig, backend: Backend
) -> jax.Array:
    """The differentiable tower under the config of the whole model; see `qwen3_vision.tower`."""
    return qwen3_vision.tower(params, inputs, cfg=_vision(cfg), backend=backend)


def _vision(cfg: Qwen3VLConfig) -> VisionConfig:
    if cfg.vision is None:
        raise ConfigError("this model has no vision section: it serves text only")
    return cfg.vision


def head(params: Params) -> jax.Array:
    """The output matrix [V, D]."""
    return params.text.embed_IE if params.text.head_VD is None else params.text.head_VD


def logits(
    head_VD: jax.Array, hidden_RD: jax.Array, *, cfg: Qwen3VLConfig, backend: Backend
) -> jax.Array:
    """float32 logits [R, V] of hidden rows after the final norm, vocabulary over "model".

    Columns behind the vocabulary, which pad it to the devices, are -inf.
    """
    with ops.matmul_precision(head_VD.dtype), jax.named_scope("logits"):
        out_RV = jnp.einsum("rd,vd->rv", hidden_RD, head_VD, preferred_element_type=jnp.float32)
        fits = head_VD.shape[0] % backend.mesh.shape[MODEL] == 0
        sharding = NamedSharding(backend.mesh, PartitionSpec(None, MODEL if fits else None))
        out_RV = jax.lax.with_sharding_constraint(out_RV, sharding)
        if head_VD.shape[0] == cfg.text.vocab_size:
            return out_RV
        exists_V = jnp.arange(head_VD.shape[0]) < cfg.text.vocab_size
        return jnp.where(exists_V, out_RV, -jnp.inf)


FAMILY = Family(
    name="qwen3_vl",
    model_types=("qwen3_vl", "qwen3_vl_text"),
    modalities=("image", "video"),
    parse_config=parse_config,
    shard=shard,
    dims=dims,
    abstract_params=abstract_params,
    axes=axes,
    checkpoint_map=checkpoint_map,
    key_prefixes=(
        ("model.language_model.", "model.language_model."),
        ("model.visual.", "model.visual."),
        ("lm_head.", "lm_head."),
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("language_model.", "model.language_model."),
        ("visual.", "model.visual."),
        ("model.", "model.language_model."),
        ("", "model.language_model."),
    ),
    skip_keys=skip_keys,
    caches=caches,
    encoders={"vision": encode_step},
    geometry=geometry,
    text_step=text_step,
    head=head,
    logits=logits,
    vocab_size=lambda cfg: cfg.text.vocab_size,
    logits_width=lambda cfg: text_dims(cfg.text)["V"],
    text_width=lambda cfg: cfg.text.width,
)
