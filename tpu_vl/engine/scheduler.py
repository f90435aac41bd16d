"""Which tokens and which frames run in the next step: continuous batching with chunked prefill.

A step takes one token of every sequence that decodes, then prompt chunks in order of arrival
under the token budget, then new sequences while a slot and pages for their whole prompt are free.
A chunk may end inside a frame. It ends before the first frame whose pool rows are not written by
this step's tower work; the frame is encoded meanwhile.

Why it always makes progress:

* Pages. A prompt's pages are taken when it is admitted, so only decoding opens pages. When none is
  free, the latest arrival gives up everything and starts anew later, its answer kept. The earliest
  arrival is never the victim while another runs, and alone it fits (EngineConfig checks that the
  pages hold the longest sequence), so it ends, and then the next one is the earliest.
* Pool rows. A sequence pins frames in prompt order and stops at the first that it cannot have, so
  its pinned frames are always the next that it reads. A pinned frame is written by the tower after
  finitely many steps, then its sequence can read it: decoding takes one token each of at most
  max_num_seqs - 1 others, which leaves budget. Read to its end, it is unpinned. When nothing is
  pinned, any one frame fits, because a frame larger than the pool is refused.
* The tower runs at least one layer of its current call per step.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tpu_vl.config import EngineConfig
from tpu_vl.engine.layout import BIAS_CAPACITY
from tpu_vl.engine.media_cache import MediaCache, PoolEntry
from tpu_vl.engine.pages import PageAllocator
from tpu_vl.engine.sequence import Frame, Sequence
from tpu_vl.engine.tower import TOWER, Tower, TowerSlice
from tpu_vl.errors import IntegrityError
from tpu_vl.models.family import VisionGeometry


@dataclass(frozen=True)
class Row:
    """A run of one sequence's tokens in a step.

    Args:
        seq: whose.
        start: index of the first token.
        num_tokens: how many.
        samples: the run ends the sequence, so its next token is chosen.
        resets: the slot is taken over: the batch clears its state first.
        pages_sent: pages of the sequence that the device already knows.
        frames: those that the run touches, each with the int32 pool rows of its cells.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    resets: bool
    pages_sent: int
    frames: tuple[tuple[Frame, np.ndarray], ...]


@dataclass
class Step:
    """What one step runs: tower slices first, then the rows as one text batch."""

    slices: list[TowerSlice] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of the text batch."""
        return sum(row.num_tokens for row in self.rows)


class Scheduler:
    """Waiting and running sequences, and everything that they hold."""

    def __init__(self, engine_config: EngineConfig, geometry: VisionGeometry | None) -> None:
        self._config = engine_config
        self.waiting: deque[Sequence] = deque()  # by arrival; all arrived after all running ones
        self.running: list[Sequence] = []  # by arrival
        self.pages = PageAllocator(engine_config.num_pages)
        self.cache = MediaCache(engine_config.pool_rows)
        self.tower = Tower(
            self.cache,
            engine_config=engine_config,
            depth=geometry.depth if geometry else 0,
            num_bins=geometry.num_bins if geometry else 1,
        )
        self.num_preemptions = 0
        self.num_frame_queries = 0
        self.num_frame_hits = 0
        self._free_slots = list(range(engine_config.max_num_seqs - 1, -1, -1))

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence behind all others."""
        self.waiting.append(seq)

    def end(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is; all that it holds is free for the next step."""
        seq.finished = True
        if seq in self.running:
            self._take_back(seq)
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def schedule(self) -> Step:
        """Plans the next step and counts its tokens as computed; an empty step means idle."""
        step = Step()
        preempted_before = self.num_preemptions
        self._decode(step)
        budget = self._config.max_num_batched_tokens - step.num_tokens
        wishes = self._prefill_wishes(budget, may_admit=self.num_preemptions == preempted_before)
        step.slices = self.tower.advance()
        self._prefill(step, wishes)
        for row in step.rows:
            self._commit(row)
        return step

    # Decoding ----------------------------------------------------------------------------------

    def _decode(self, step: Step) -> None:
        for seq in list(self.running):
            if seq.slot is None or not seq.decodes or seq.complete:
                continue
            if self._open_page(seq):
                step.rows.append(self._row(seq, 1))

    def _open_page(self, seq: Sequence) -> bool:
        """Gives the sequence a page for its newest token; False: it was itself preempted."""
        if len(seq.pages) * self._config.page_size >= seq.length:
            return True
        while not self.pages.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        seq.pages += self.pages.allocate(1)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._take_back(seq)
        self.running.remove(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    # Prefill -----------------------------------------------------------------------------------

    def _prefill_wishes(self, budget: int, *, may_admit: bool) -> list[Sequence]:
        """Sequences with prompt left that the budget may reach, their next frames asked for."""
        wishes: list[Sequence] = []
        candidates = self._prefilling(may_admit)
        while budget > 0 and (seq := next(candidates, None)) is not None:
            wishes.append(seq)
            budget -= self._ask_for_frames(seq, budget)
        return wishes

    def _prefilling(self, may_admit: bool) -> Iterator[Sequence]:
        yield from [s for s in self.running if not s.decodes and not s.complete]
        while may_admit and self.waiting and self._admit(self.waiting[0]):
            yield self.running[-1]

    def _admit(self, seq: Sequence) -> bool:
        num_pages = -(-seq.length // self._config.page_size)
        # One page of headroom for each running sequence, or it would be preempted at once.
        if seq.num_pending or not self._free_slots:
            return False
        if num_pages + len(self.running) > self.pages.num_free and self.running:
            return False
        self.waiting.popleft()
        seq.slot = self._free_slots.pop()
        seq.pages = self.pages.allocate(num_pages)
        seq.num_restored = seq.length
        self.running.append(seq)
        return True

    def _ask_for_frames(self, seq: Sequence, budget: int) -> int:
        """Pins and queues the frames of the next chunk; returns its tokens before any unready one.

        The budget behind an unready frame is left to later arrivals: the tower may need several
        steps, and it packs the frames of several requests into one call.
        """
        start, end = seq.num_computed, min(seq.length, seq.num_computed + budget)
        num_tokens = end - start
        for frame in seq.frames_within(start, end):
            entry = self._pin(seq, frame)
            if entry is None:
                return min(num_tokens, max(0, frame.start - start))
            if not entry.ready:
                self.tower.want(frame)
                num_tokens = min(num_tokens, max(0, frame.start - start))
        return num_tokens

    def _pin(self, seq: Sequence, frame: Frame) -> PoolEntry | None:
        known, owner = self.cache.entry(frame.key), _owner(seq, frame)
        if known is not None and owner in known.owners:
            return known
        entry = self.cache.pin(frame.key, frame.num_tokens, owner)
        self.num_frame_queries += entry is not None
        self.num_frame_hits += known is not None
        return entry

    def _prefill(self, step: Step, wishes: list[Sequence]) -> None:
        budget = self._config.max_num_batched_tokens - step.num_tokens
        bias_room = BIAS_CAPACITY
        for seq in wishes:
            num_tokens = self._readable(seq, min(budget, seq.length - seq.num_computed))
            num_biases = len(seq.sampling.logit_bias) if seq.fresh else 0
            if num_tokens > 0 and num_biases <= bias_room:
                step.rows.append(self._row(seq, num_tokens))
                budget -= num_tokens
                bias_room -= num_biases

    def _readable(self, seq: Sequence, num_tokens: int) -> int:
        """How many of the next tokens come before the first frame that is not pinned and ready."""
        start = seq.num_computed
        for frame in seq.frames_within(start, start + num_tokens):
            entry = self.cache.entry(frame.key)
            if entry is None or not entry.ready or _owner(seq, frame) not in entry.owners:
                return max(0, frame.start - start)
        return num_tokens

    # Bookkeeping -------------------------------------------------------------------------------

    def _row(self, seq: Sequence, num_tokens: int) -> Row:
        start, end = seq.num_computed, seq.num_computed + num_tokens
        frames = []
        for frame in seq.frames_within(start, end):
            entry = self.cache.entry(frame.key)
            assert entry is not None
            frames.append((frame, entry.rows_M))
        return Row(
            seq=seq,
            start=start,
            num_tokens=num_tokens,
            samples=end == seq.length,
            resets=seq.fresh,
            pages_sent=seq.num_pages_sent,
            frames=tuple(frames),
        )

    def _commit(self, row: Row) -> None:
        """Counts a row as computed; frames read to their end may be overwritten by later steps."""
        seq = row.seq
        seq.fresh = False
        seq.num_computed += row.num_tokens
        seq.num_pages_sent = -(-seq.num_computed // self._config.page_size)
        seq.num_pending += row.samples
        for frame, _ in row.frames:
            if frame.end <= seq.num_computed:
                self._unpin(seq, frame)

    def _unpin(self, seq: Sequence, frame: Frame) -> None:
        entry, owner = self.cache.entry(frame.key), _owner(seq, frame)
        if entry is not None and owner in entry.owners:
            self.cache.unpin(frame.key, owner)
            if self.cache.entry(frame.key) is None:
                self.tower.forget(frame.key)

    def _take_back(self, seq: Sequence) -> None:
        """Frees all that a running sequence holds; it would start anew."""
        assert seq.slot is not None
        for frame in seq.frames:
            self._unpin(seq, frame)
        self.pages.release(seq.pages)
        self._free_slots.append(seq.slot)
        seq.pages, seq.slot = [], None
        seq.num_computed = seq.num_pages_sent = 0
        seq.fresh = True

    def check_integrity(self) -> None:
        """Checks that pages, slots and pool rows are each held once, and by the living.

        Raises:
            IntegrityError: bookkeeping contradicts itself.
        """
        self.pages.check_integrity(seq.pages for seq in self.running)
        slots = [seq.slot for seq in self.running if seq.slot is not None]
        if sorted([*slots, *self._free_slots]) != list(range(self._config.max_num_seqs)):
            raise IntegrityError(f"slots {slots} are held, {self._free_slots} are free")
        owners: set[Hashable] = {_owner(s, f) for s in self.running for f in s.frames} | {TOWER}
        self.cache.check_integrity(owners)
        self.tower.check_integrity()
        for seq in self.running:
            capacity = len(seq.pages) * self._config.page_size
            if seq.finished or not seq.num_computed <= min(seq.length, capacity):
                raise IntegrityError(
                    f"{seq.request_id}: {seq.num_computed} computed of {seq.length} tokens, pages "
                    f"for {capacity}, finished {seq.finished}"
                )
        for seq in self.waiting:
            if seq.finished or seq.slot is not None or seq.pages or seq.num_computed:
                raise IntegrityError(f"{seq.request_id} waits but holds pages {seq.pages}")
        arrivals = [seq.arrival for seq in [*self.running, *self.waiting]]
        if arrivals != sorted(arrivals):
            raise IntegrityError(f"sequences are out of order of arrival: {arrivals}")


def _owner(seq: Sequence, frame: Frame) -> Hashable:
    """Unique per place in a prompt: a request may show the same picture twice."""
    return (seq.arrival, frame.start)
