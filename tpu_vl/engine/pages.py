"""The allocator of KV pages: pure host bookkeeping."""

from collections.abc import Iterable

from tpu_vl.errors import IntegrityError


class PageAllocator:
    """Hands out page numbers 0 to `num_pages - 1`, each to one sequence at a time."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Takes pages; the caller has checked `num_free`.

        Raises:
            IntegrityError: more pages than are free.
        """
        if num_pages > len(self._free):
            raise IntegrityError(f"{num_pages} KV pages asked for, {len(self._free)} are free")
        return [self._free.pop() for _ in range(num_pages)]

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back."""
        self._free.extend(pages)

    def check_integrity(self, held: Iterable[list[int]]) -> None:
        """Checks that every page is free or held once.

        Args:
            held: the pages of every sequence.

        Raises:
            IntegrityError: a page is held twice, held and free, or lost.
        """
        pages = [page for pages in held for page in pages] + self._free
        if sorted(pages) != list(range(self.num_pages)):
            lost = set(range(self.num_pages)) - set(pages)
            twice = sorted({p for p in pages if pages.count(p) > 1})
            raise IntegrityError(f"KV pages lost {sorted(lost)}, held twice {twice}")
