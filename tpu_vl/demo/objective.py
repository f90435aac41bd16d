"""The loss that the bundled model is trained on, and how many answers it gets right."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_vl.demo import words
from tpu_vl.demo.batches import MERGE, ROW_PATCHES, ROW_SAMPLES, ROW_TARGETS, Batch
from tpu_vl.mesh import make_mesh
from tpu_vl.models import ops, qwen3_vl
from tpu_vl.models.family import Backend, EncodeInputs

TASKS = ("shape", "colour", "direction")
ANSWERS = (words.SHAPES, tuple(words.COLOURS), tuple(words.DIRECTIONS))
ALIGNMENT_WEIGHT = 1.0


def training_backend() -> Backend:
    """One device and the differentiable implementations."""
    return Backend(
        mesh=make_mesh(1),
        vision_attention="dense",
        paged_attention="dense",
        row_block=ROW_PATCHES,
    )


def answer_ids(token_id: Mapping[str, int]) -> tuple[np.ndarray, ...]:
    """int32 ids of the answers to each of `TASKS`, in the order of their labels.

    Args:
        token_id: id of every token; every answer is one token.
    """
    return tuple(np.asarray([token_id[word] for word in answers]) for answers in ANSWERS)


def loss(
    params: Any,
    batch: Batch,
    *,
    answers: tuple[np.ndarray, ...],
    cfg: qwen3_vl.Qwen3VLConfig,
    backend: Backend,
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy of the answers' tokens, plus the weighted alignment of the media rows.

    The alignment asks the mean media row of each sample, without the language model, for the
    words that describe the sample: so the tower learns from every sample, whatever is asked.

    Args:
        params: float32 tree of the family.
        batch: G packed rows.
        answers: from `answer_ids`.
        cfg, backend: static.

    Returns:
        The loss; and int32 [2, tasks]: right and all answer words by task.
    """
    logits_GAV, rows_GSV = jax.vmap(lambda row: _logits(params, row, cfg, backend))(batch)
    targets_GA = jnp.asarray(batch.targets_GA)
    asked = _cross_entropy(logits_GAV, targets_GA)
    labels_GS3 = jnp.asarray(batch.labels_GS3)
    aligned = sum(
        _cross_entropy(rows_GSV[..., ids], labels_GS3[..., task])
        for task, ids in enumerate(answers)
    )
    right_GA = jnp.argmax(logits_GAV, axis=-1) == targets_GA
    counts = []
    for ids in answers:
        of_task_GA = jnp.isin(targets_GA, jnp.asarray(ids))
        counts.append(jnp.stack([jnp.sum(of_task_GA & right_GA), jnp.sum(of_task_GA)]))
    return asked + ALIGNMENT_WEIGHT * aligned, jnp.stack(counts, axis=1)


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over targets >= 0; others are padding."""
    valid = targets >= 0
    one_hot = jax.nn.one_hot(targets, logits.shape[-1])  # all zero where the target is -1
    total = jnp.sum(jax.nn.log_softmax(logits) * one_hot)
    return -total / jnp.maximum(jnp.sum(valid), 1)


def _logits(
    params: Any, row: Any, cfg: qwen3_vl.Qwen3VLConfig, backend: Backend
) -> tuple[jax.Array, jax.Array]:
    """Of one row of a `Batch`: logits_AV of its answers, logits_SV of its mean media rows."""
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

    def attend(q: Any, k: Any, v: Any, rope: Any, state: None) -> tuple[jax.Array, None]:
        return ops.causal_attention(q, k, v, rope, row.segments_GT, scale=scale), state

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
    mean_SD = _mean_rows(pool_MJD[:, 0], row)
    hidden_XD = jnp.concatenate([hidden_TD[row.places_GA], mean_SD])
    normed_XD = qwen3_vl.final_norm(params.text, hidden_XD, cfg=cfg)
    logits_XV = qwen3_vl.logits(qwen3_vl.head(params), normed_XD, cfg=cfg, backend=backend)
    return logits_XV[:ROW_TARGETS], logits_XV[ROW_TARGETS:]


def _mean_rows(rows_MD: jax.Array, row: Any) -> jax.Array:
    """mean_SD of the media rows of each sample in one packed row."""
    of_sample_ST = row.segments_GT == jnp.arange(ROW_SAMPLES)[:, None]
    of_row_TM = row.pool_row_GT[:, None] == jnp.arange(rows_MD.shape[0])
    weight_SM = of_sample_ST.astype(jnp.float32) @ of_row_TM.astype(jnp.float32)
    return weight_SM @ rows_MD / jnp.maximum(weight_SM.sum(axis=1, keepdims=True), 1)
