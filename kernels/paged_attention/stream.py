"""The copies of the paged attention kernel: cached pages to VMEM, queries in, results out.

A tile's key blocks follow each other in a ring of buffers, tile after tile: the copies of the next
blocks, of whichever tile, are in flight while one is computed, so that HBM idles only at the ends
of a phase.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_vl.kernels.paged_attention.plan import Plan, ceil_quotient, quotient

RUN = 8  # page copies that start with no loop around each
FIELDS = 4  # of a tile in scalar memory: sequence, first row, number of rows, causal limit


@dataclass(frozen=True)
class TileList:
    """Tiles in scalar memory: `FIELDS` runs of equal length."""

    flat: Any
    num_tiles: Any

    def _field(self, index: int, tile: Any) -> Any:
        return self.flat[index * (self.flat.shape[0] // FIELDS) + tile]

    def seq(self, tile: Any) -> Any:
        """Sequence."""
        return self._field(0, tile)

    def row(self, tile: Any) -> Any:
        """First token."""
        return self._field(1, tile)

    def num_rows(self, tile: Any) -> Any:
        """Tokens."""
        return self._field(2, tile)

    def limit(self, tile: Any) -> Any:
        """Cached tokens that its last token sees."""
        return self._field(3, tile)


class Item(NamedTuple):
    """A key block of a tile on its way through a phase.

    Args:
        tile: index.
        block: index within the tile.
        left: cached tokens of the tile from the block's start; 0: no item.
    """

    tile: Any
    block: Any
    left: Any


@dataclass(frozen=True)
class Stream:
    """One phase: its tiles in order and the rings of buffers that its copies fill.

    Args:
        plan: sizes.
        tiles: the phase's tiles.
        single: every tile is one token.
        block_pages: pages of a key block.
        table: flat page table in scalar memory.
        q_hbm: all rows of queries; a tile's results take the place of its queries.
        pages_hbm: all pages.
        q_bufs, out_bufs, kv_bufs: rings.
        q_sems, out_sems, kv_sems: their semaphores.
    """

    plan: Plan
    tiles: TileList
    single: bool
    block_pages: int
    table: Any
    q_hbm: Any
    pages_hbm: Any
    q_bufs: Any
    out_bufs: Any
    kv_bufs: Any
    q_sems: Any
    out_sems: Any
    kv_sems: Any

    @property
    def block(self) -> int:
        """Tokens of a key block."""
        return self.block_pages * self.plan.page_size

    @property
    def num_bufs(self) -> int:
        """Length of the rings."""
        return self.kv_bufs.shape[0]

    def first_item(self, tile: Any) -> Item:
        """The first key block of a tile; none past the last tile."""
        last = jnp.maximum(self.tiles.num_tiles - 1, 0)
        left = jnp.where(tile < self.tiles.num_tiles, self.tiles.limit(jnp.minimum(tile, last)), 0)
        return Item(tile, jnp.int32(0), left)

    def following(self, item: Item) -> Item:
        """The next key block: of the tile, or the first of the next tile."""
        inner = item.left > self.block
        other = self.first_item(item.tile + 1)
        return Item(
            jnp.where(inner, item.tile, other.tile),
            jnp.where(inner, item.block + 1, 0),
            jnp.where(inner, item.left - self.block, other.left),
        )

    def _num_pages(self, left: Any) -> Any:
        return jnp.minimum(ceil_quotient(left, self.plan.page_size), self.block_pages)

    def _page_copy(self, first: Any, page: Any, slot: Any) -> Any:
        size = self.plan.page_size
        return pltpu.make_async_copy(
            self.pages_hbm.at[self.table[first + page]],
            self.kv_bufs.at[slot, pl.ds(page * size, size)],
            self.kv_sems.at[slot],
        )

    def _first_entry(self, item: Item) -> Any:
        return self.tiles.seq(item.tile) * self.plan.max_pages + item.block * self.block_pages

    def start_full(self, item: Item, slot: Any) -> None:
        """Starts the copies of a key block all of whose pages exist."""
        first = self._first_entry(item)
        for page in range(self.block_pages):
            self._page_copy(first, page, slot).start()

    def start_part(self, item: Item, slot: Any, scope: str) -> None:
        """Starts the copies of the pages of a key block that exist.

        Args:
            item: which.
            slot: of the ring.
            scope: name for profiles.
        """
        first, count = self._first_entry(item), self._num_pages(item.left)
        num_runs = quotient(count, RUN)

        @pl.loop(0, num_runs)
        def _(run: Any) -> None:
            with jax.named_scope(f"{scope}_run"):
                for page in range(RUN):
                    self._page_copy(first, run * RUN + page, slot).start()

        @pl.loop(num_runs * RUN, count)
        def _(page: Any) -> None:
            with jax.named_scope(scope):
                self._page_copy(first, page, slot).start()

    def wait_full(self, slot: Any) -> None:
        """Waits for a whole key block."""
        buf = self.kv_bufs.at[slot]
        pltpu.make_async_copy(buf, buf, self.kv_sems.at[slot]).wait()

    def wait_part(self, item: Item, slot: Any) -> None:
        """Waits for the pages of a key block that exist."""

        @pl.when(item.left > 0)
        def _() -> None:
            size = self._num_pages(item.left) * self.plan.page_size
            buf = self.kv_bufs.at[slot, pl.ds(0, size)]
            pltpu.make_async_copy(buf, buf, self.kv_sems.at[slot]).wait()

    def _rows(self, tile: Any) -> Any:
        return 1 if self.single else self.tiles.num_rows(tile)

    def query_copy(self, tile: Any) -> Any:
        """The copy of a tile's queries into its slot."""
        slot, size = ring(tile, self.num_bufs), self._rows(tile)
        return pltpu.make_async_copy(
            self.q_hbm.at[pl.ds(self.tiles.row(tile), size)],
            self.q_bufs.at[slot, pl.ds(0, size)],
            self.q_sems.at[slot],
        )

    def result_copy(self, tile: Any) -> Any:
        """The copy of a tile's results out of its slot."""
        slot, size = ring(tile, self.out_bufs.shape[0]), self._rows(tile)
        return pltpu.make_async_copy(
            self.out_bufs.at[slot, pl.ds(0, size)],
            self.q_hbm.at[pl.ds(self.tiles.row(tile), size)],
            self.out_sems.at[slot],
        )


def ring(index: Any, size: int) -> Any:
    """Slot of an item in a ring."""
    return index - quotient(index, size) * size
