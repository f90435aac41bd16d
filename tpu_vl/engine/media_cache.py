"""The host's view of the media pool: which frame's rows lie where, and who still needs them.

A frame is keyed by its medium's digest and its place in it, so the same picture is encoded once,
whether it comes twice in a request or in two requests. Rows of a frame are reserved at once.
A frame that some request still has to read is pinned; the others are kept, least recently used
first to go, until their rows are wanted.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from tpu_vl.errors import IntegrityError

FrameKey = tuple[bytes, int]
"""A medium's digest and the frame's place in the medium."""


@dataclass
class PoolEntry:
    """One frame in the pool.

    Args:
        rows_M: int32 its pool rows, in token order.
        ready: a program that writes the rows has been dispatched before any that reads them.
        owners: who still needs the rows; empty: they may be taken.
    """

    rows_M: np.ndarray
    ready: bool = False
    owners: set[Hashable] = field(default_factory=set)


class MediaCache:
    """Frames and rows of the pool."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._entries: dict[FrameKey, PoolEntry] = {}
        self._idle: OrderedDict[FrameKey, None] = OrderedDict()  # without owners, oldest first

    @property
    def num_pinned_rows(self) -> int:
        """Rows of frames that somebody still needs."""
        return sum(e.rows_M.size for e in self._entries.values() if e.owners)

    def entry(self, key: FrameKey) -> PoolEntry | None:
        """The frame's entry, if it has rows."""
        return self._entries.get(key)

    def pin(self, key: FrameKey, num_rows: int, owner: Hashable) -> PoolEntry | None:
        """Makes `owner` need a frame, reserving rows where it has none.

        Args:
            key: the frame.
            num_rows: its merged cells.
            owner: unique among those that need it.

        Returns:
            The entry, to be encoded unless it is ready; None: its rows cannot be had while others
            need theirs.
        """
        entry = self._entries.get(key)
        if entry is not None and owner in entry.owners:
            return entry
        if entry is None:
            if not self._make_room(num_rows):
                return None
            rows = [self._free.pop() for _ in range(num_rows)]
            entry = self._entries[key] = PoolEntry(np.asarray(rows, np.int32))
        self._idle.pop(key, None)
        entry.owners.add(owner)
        return entry

    def mark_ready(self, key: FrameKey) -> None:
        """Notes that the program which writes the frame's rows precedes all that follow."""
        self._entries[key].ready = True

    def unpin(self, key: FrameKey, owner: Hashable) -> None:
        """Ends `owner`'s need of a frame; rows that were never written are given back at once."""
        entry = self._entries[key]
        entry.owners.discard(owner)
        if entry.owners:
            return
        if entry.ready:
            self._idle[key] = None
            self._idle.move_to_end(key)
        else:
            self._drop(key)

    def _make_room(self, num_rows: int) -> bool:
        idle_rows = sum(self._entries[key].rows_M.size for key in self._idle)
        if num_rows > len(self._free) + idle_rows:
            return False
        while len(self._free) < num_rows:
            self._drop(next(iter(self._idle)))
        return True

    def _drop(self, key: FrameKey) -> None:
        self._idle.pop(key, None)
        self._free.extend(self._entries.pop(key).rows_M.tolist())

    def check_integrity(self, owners: set[Hashable]) -> None:
        """Checks that every row is free or of one frame, and that owners are alive.

        Args:
            owners: all that may need a frame now.

        Raises:
            IntegrityError: a row is lost or shared, or somebody gone still pins a frame.
        """
        rows = [*self._free, *(int(r) for e in self._entries.values() for r in e.rows_M)]
        if sorted(rows) != list(range(self.num_rows)):
            raise IntegrityError(f"media pool rows lost or shared: {len(rows)} of {self.num_rows}")
        for key, entry in self._entries.items():
            if (key in self._idle) == bool(entry.owners):
                raise IntegrityError(f"frame {key[1]} with owners {entry.owners} is listed wrongly")
            if not entry.owners and not entry.ready:
                raise IntegrityError(f"frame {key[1]} holds rows that nobody will write")
            if entry.owners - owners:
                raise IntegrityError(f"frame {key[1]} is pinned by {entry.owners - owners}: gone")
