"""Training batches: talks packed several to a row."""

from functools import cache
from typing import NamedTuple

import numpy as np

from tpu_vl.demo import samples
from tpu_vl.demo.talks import CELL_LABELS, IGNORE, MERGE, TRUNK, Talk, TalkMaker
from tpu_vl.vision.positions import interpolation_tables, patch_coords

# A row holds two or three talks; the largest talk of any kind fits.
ROW_PATCHES = 128
ROW_TOKENS = 256
ROW_TARGETS = 64
POSITION_SIDE = 8
PATCH_WIDTH = 1536
MAX_BRANCHES = 5

# Share of each kind in percent, at some steps and in between: single shapes and digits first, then
# what is built of them and movement, at last most of what takes longest.
_MIX_STEPS = (0, 5000, 9000)
_MIX = {
    "one": (34, 6, 4),
    "two": (10, 24, 12),
    "crowd": (6, 12, 20),
    "digit": (24, 8, 8),
    "number": (12, 12, 14),
    "pair": (4, 6, 12),
    "move": (5, 16, 6),
    "turn": (5, 16, 24),
}
# Share of the pictures of two shapes that are mirrored, along each axis. A tower that cannot trust
# its own positions leaves it to the language model to tell left from right, by the positions of the
# media tokens: more and more, once it tells them at all.
_MIRRORED_STEPS = (0, 6000, 12_000)
_MIRRORED = (0.1, 0.1, 0.4)


class Batch(NamedTuple):
    """G packed rows of T tokens, P patches and M merged cells, padding last.

    Fields: uint8 patches; int32 patch coordinates, position-table cells and (float32) weights,
    bounds of each patch's frame, valid patches; int32 ids, M-RoPE positions, media row of each
    token (-1: text), the talk that a token belongs to and its branch (`TRUNK`: all of them); then,
    for each of the A tokens to be learnt, the place whose hidden row predicts it and the token
    (-1: padding), the kind of its sample; and the labels of each cell (-1: padding).
    """

    patches_GPW: np.ndarray
    coords_G2P: np.ndarray
    interp_index_G4P: np.ndarray
    interp_weight_G4P: np.ndarray
    bounds_G2P: np.ndarray
    num_patches_G: np.ndarray
    ids_GT: np.ndarray
    positions_G3T: np.ndarray
    pool_row_GT: np.ndarray
    segments_GT: np.ndarray
    branches_GT: np.ndarray
    places_GA: np.ndarray
    targets_GA: np.ndarray
    kinds_GA: np.ndarray
    labels_GML: np.ndarray


@cache
def _tables(
    grid_h: int, grid_w: int, mirrored: tuple[bool, bool]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coordinates, position-table cells and weights of a frame's patches."""
    index_4P, weight_4P = interpolation_tables(grid_h, grid_w, POSITION_SIDE, MERGE)
    coords_2P = patch_coords(grid_h, grid_w, MERGE)
    cells = np.arange(grid_h * grid_w // MERGE**2).reshape(grid_h // MERGE, grid_w // MERGE)
    for axis, is_mirrored in enumerate(mirrored):
        cells = np.flip(cells, axis) if is_mirrored else cells
    order = (cells.reshape(-1, 1) * MERGE**2 + np.arange(MERGE**2)).reshape(-1)
    return coords_2P[:, order], index_4P[:, order], weight_4P[:, order]


def empty(num_rows: int) -> Batch:
    """A batch of padding only."""
    rows, patches, tokens = num_rows, ROW_PATCHES, ROW_TOKENS
    return Batch(
        patches_GPW=np.zeros((rows, patches, PATCH_WIDTH), np.uint8),
        coords_G2P=np.zeros((rows, 2, patches), np.int32),
        interp_index_G4P=np.zeros((rows, 4, patches), np.int32),
        interp_weight_G4P=np.zeros((rows, 4, patches), np.float32),
        bounds_G2P=np.full((rows, 2, patches), patches, np.int32),
        num_patches_G=np.zeros(rows, np.int32),
        ids_GT=np.zeros((rows, tokens), np.int32),
        positions_G3T=np.zeros((rows, 3, tokens), np.int32),
        pool_row_GT=np.full((rows, tokens), -1, np.int32),
        segments_GT=np.full((rows, tokens), -1, np.int32),
        branches_GT=np.full((rows, tokens), TRUNK, np.int32),
        places_GA=np.zeros((rows, ROW_TARGETS), np.int32),
        targets_GA=np.full((rows, ROW_TARGETS), IGNORE, np.int32),
        kinds_GA=np.full((rows, ROW_TARGETS), IGNORE, np.int32),
        labels_GML=np.full((rows, patches // MERGE**2, len(CELL_LABELS)), IGNORE, np.int32),
    )


class Fill(NamedTuple):
    """How much of a row is taken: talks, patches, tokens and targets."""

    segment: int = 0
    patch: int = 0
    token: int = 0
    target: int = 0

    def after(self, talk: Talk) -> "Fill":
        """The fill with one more talk in the row."""
        return Fill(
            self.segment + 1,
            self.patch + len(talk.patches_PW),
            self.token + len(talk.ids_T),
            self.target + len(talk.places_A),
        )

    def fits(self) -> bool:
        """Whether a row can hold this much."""
        return self.patch <= ROW_PATCHES and self.token <= ROW_TOKENS and self.target <= ROW_TARGETS


def put(batch: Batch, row: int, fill: Fill, talk: Talk, kind: int) -> None:
    """Writes a talk into a row behind what is there."""
    after = fill.after(talk)
    first = fill.patch
    for grid_t, grid_h, grid_w in talk.grids:
        per_frame = grid_h * grid_w
        patches = slice(first, first + grid_t * per_frame)
        coords_2P, index_4P, weight_4P = _tables(grid_h, grid_w, talk.mirrored)
        batch.coords_G2P[row, :, patches] = np.tile(coords_2P, (1, grid_t))
        batch.interp_index_G4P[row, :, patches] = np.tile(index_4P, (1, grid_t))
        batch.interp_weight_G4P[row, :, patches] = np.tile(weight_4P, (1, grid_t))
        first_P = first + np.repeat(np.arange(grid_t) * per_frame, per_frame)
        batch.bounds_G2P[row, :, patches] = np.stack([first_P, first_P + per_frame])
        first = patches.stop
    tokens, targets = slice(fill.token, after.token), slice(fill.target, after.target)
    batch.patches_GPW[row, fill.patch : after.patch] = talk.patches_PW
    batch.num_patches_G[row] = after.patch
    batch.ids_GT[row, tokens] = talk.ids_T
    batch.positions_G3T[row, :, tokens] = talk.positions_3T
    cells = fill.patch // MERGE**2 + np.cumsum(talk.is_media_T) - 1
    batch.pool_row_GT[row, tokens] = np.where(talk.is_media_T, cells, -1)
    batch.segments_GT[row, tokens] = fill.segment
    batch.branches_GT[row, tokens] = talk.branch_T
    batch.places_GA[row, targets] = fill.token + talk.places_A
    batch.targets_GA[row, targets] = talk.ids_T[talk.places_A + 1]
    batch.kinds_GA[row, targets] = kind
    batch.labels_GML[row, fill.patch // MERGE**2 : after.patch // MERGE**2] = talk.labels_ML


def mix(step: int) -> np.ndarray:
    """Share of each of `samples.KINDS`, in its order, at a step of a run."""
    shares = np.asarray([np.interp(step, _MIX_STEPS, _MIX[kind]) for kind in samples.KINDS])
    return shares / shares.sum()


def mirrored_share(step: int) -> float:
    """Share of the pictures of two shapes that are mirrored along an axis, at a step of a run."""
    return float(np.interp(step, _MIRRORED_STEPS, _MIRRORED))


def make_batch(maker: TalkMaker, seed: int, num_rows: int, step: int) -> Batch:
    """The training batch of a step: the same arguments give the same batch, of new samples.

    Args:
        maker: makes the talks.
        seed: of the run.
        num_rows: G.
        step: number of the batch.
    """
    rng = np.random.default_rng([seed, step])
    shares, mirrored = mix(step), mirrored_share(step)
    kinds = list(samples.KINDS)
    batch = empty(num_rows)
    fills = [Fill()] * num_rows
    misses = 0
    # Every talk goes into the fullest row that has room; a few that find none end the batch.
    while misses < num_rows // 2:
        kind = int(rng.choice(len(kinds), p=shares))
        sample = samples.sample("train", kinds[kind], int(rng.integers(1 << 40)))
        talk = maker.talk(sample, rng, MAX_BRANCHES, mirrored)
        rows = [row for row in range(num_rows) if fills[row].after(talk).fits()]
        if not rows:
            misses += 1
            continue
        row = max(rows, key=lambda row: fills[row].token + fills[row].patch)
        put(batch, row, fills[row], talk, kind)
        fills[row] = fills[row].after(talk)
    return batch
