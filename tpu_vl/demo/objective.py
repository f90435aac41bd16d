"""The loss that the bundled model is trained on, and how many answers it gets right."""

from typing import Any

import jax
import jax.numpy as jnp

from tpu_vl.demo import samples
from tpu_vl.demo.batches import ROW_PATCHES, Batch
from tpu_vl.demo.talks import CELL_LABELS, MERGE, TRUNK
from tpu_vl.mesh import make_mesh
from tpu_vl.models import ops, qwen3_vl
from tpu_vl.models.family import Backend, EncodeInputs

PROBE_WEIGHT = 1.0
_EMPTY_WEIGHT = 0.2  # most cells show nothing, and that is soon learnt


def training_backend() -> Backend:
    """One device and the differentiable implementations."""
    return Backend(
        mesh=make_mesh(1),
        vision_attention="dense",
        paged_attention="dense",
        row_block=ROW_PATCHES,
    )


def initial_probes(width: int, key: jax.Array) -> dict[str, jax.Array]:
    """Random linear probes [width, classes] for each of `CELL_LABELS`; for training only."""
    keys = jax.random.split(key, len(CELL_LABELS))
    return {
        name: jax.random.normal(k, (width, classes)) * width**-0.5
        for k, (name, classes) in zip(keys, CELL_LABELS.items(), strict=True)
    }


def loss(
    params: Any,
    probes: dict[str, jax.Array],
    batch: Batch,
    *,
    cfg: qwen3_vl.Qwen3VLConfig,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy of the answers' tokens, plus that of what the probes read in every cell.

    The probes read the sum of the vectors that the language model adds for a cell, without the
    language model: so the tower learns from every picture, whatever is asked, and spreads what it
    knows over the merger and the DeepStack levels.

    Args:
        params: float32 tree of the family.
        probes: from `initial_probes`.
        batch: G packed rows.
        cfg, backend: static.

    Returns:
        The loss; and int32 [2, kinds + labels]: right and all answer tokens by kind of sample,
        then cells by label, of those that show something.
    """
    logits_GAV, rows_GMD = jax.vmap(lambda row: answer_logits(params, row, cfg, backend))(batch)
    targets_GA, kinds_GA = jnp.asarray(batch.targets_GA), jnp.asarray(batch.kinds_GA)
    total = _cross_entropy(logits_GAV, targets_GA)
    right_GA = jnp.argmax(logits_GAV, axis=-1) == targets_GA
    counts = []
    for kind in range(len(samples.KINDS)):
        of_kind_GA = kinds_GA == kind
        counts.append(jnp.stack([jnp.sum(of_kind_GA & right_GA), jnp.sum(of_kind_GA)]))
    labels_GML = jnp.asarray(batch.labels_GML)
    for i, name in enumerate(CELL_LABELS):
        logits_GMC, labels_GM = rows_GMD @ probes[name], labels_GML[..., i]
        weights_GM = jnp.where(labels_GM > 0, 1.0, _EMPTY_WEIGHT)
        total += PROBE_WEIGHT * _cross_entropy(logits_GMC, labels_GM, weights_GM)
        shown_GM = labels_GM > 0
        right_GM = shown_GM & (jnp.argmax(logits_GMC, axis=-1) == labels_GM)
        counts.append(jnp.stack([jnp.sum(right_GM), jnp.sum(shown_GM)]))
    return total, jnp.stack(counts, axis=1)


def _cross_entropy(logits: jax.Array, targets: jax.Array, weights: Any = 1.0) -> jax.Array:
    """The weighted mean over targets >= 0; others are padding."""
    weights = jnp.where(targets >= 0, weights, 0.0)
    one_hot = jax.nn.one_hot(targets, logits.shape[-1])  # all zero where the target is -1
    losses = -jnp.sum(jax.nn.log_softmax(logits) * one_hot, axis=-1)
    return jnp.sum(weights * losses) / jnp.maximum(jnp.sum(weights), 1e-3)


def answer_logits(
    params: Any, row: Any, cfg: qwen3_vl.Qwen3VLConfig, backend: Backend
) -> tuple[jax.Array, jax.Array]:
    """What the model makes of one row of a `Batch`.

    Args:
        params: float32 tree of the family.
        row: fields of a `Batch` without their first axis.
        cfg, backend: static.

    Returns:
        logits_AV of its answers' tokens, and of each cell the sum of its vectors.
    """
    inputs = EncodeInputs(
        patches_PW=row.patches_GPW,
        coords_2P=row.coords_G2P,
        interp_index_4P=row.interp_index_G4P,
        interp_weight_4P=row.interp_weight_G4P,
        bounds_2P=row.bounds_G2P,
        rows_M=jnp.zeros(ROW_PATCHES // MERGE**2, jnp.int32),
        num_patches_X=row.num_patches_G[None],
        layers_2=jnp.zeros(2, jnp.int32),
    )
    pool_MJD = qwen3_vl.tower(params.vision, inputs, cfg=cfg, backend=backend)
    scale = cfg.text.head_dim**-0.5
    seen_TT = _seen(row.segments_GT, row.branches_GT)

    def attend(q: Any, k: Any, v: Any, rope: Any, state: None) -> tuple[jax.Array, None]:
        return ops.masked_attention(q, k, v, rope, seen_TT, scale=scale), state

    hidden_TD, _ = qwen3_vl.text_layers(
        params.text,
        row.ids_GT,
        row.positions_G3T,
        jnp.pad(pool_MJD, ((0, 1), (0, 0), (0, 0))),  # the row of text
        row.pool_row_GT,
        (None,) * cfg.text.num_layers,
        attend,
        cfg=cfg,
        backend=backend,
    )
    hidden_AD = hidden_TD[row.places_GA]
    normed_AD = qwen3_vl.final_norm(params.text, hidden_AD, cfg=cfg)
    logits_AV = qwen3_vl.logits(qwen3_vl.head(params), normed_AD, cfg=cfg, backend=backend)
    return logits_AV, pool_MJD.sum(axis=1)


def _seen(segments_T: jax.Array, branches_T: jax.Array) -> jax.Array:
    """Which tokens [S] a token [T] sees: earlier ones of its talk, in the trunk or its branch."""
    order = jnp.arange(segments_T.size)
    earlier = order[:, None] >= order[None]
    same_talk = segments_T[:, None] == segments_T[None]
    open_branch = (branches_T[None] == TRUNK) | (branches_T[:, None] == branches_T[None])
    return earlier & same_talk & open_branch
