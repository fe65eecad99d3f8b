"""Who owns which page of the pool, and which pages hold a prefix that can be used again.

Every page is in exactly one of three states: *free* (holds nothing), *owned* (one or more requests
read it), *idle* (nobody reads it, but its prefix is known: it can be owned again or evicted).

Pages of two tokens; a second request with the same first page finds it:

>>> pool = PagePool(num_pages=3)
>>> first = pool.allocate(2)
>>> pool.publish(first[0], b"key of tokens 0 and 1")
>>> pool.release(first)
>>> (pool.num_free, pool.num_idle), pool.reuse([b"key of tokens 0 and 1", b"another"]) == first[:1]
((2, 1), True)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PagePool:
    """Reference counts, the free list and the prefix cache of one pool of pages.

    Args:
        num_pages: pages of the pool.

    Not calling ``publish`` switches the prefix cache off: no page ever becomes idle.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: page 0 is handed out first
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages nobody reads whose prefix is known."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` can hand out."""
        return len(self._free) + len(self._idle)

    @property
    def num_owned(self) -> int:
        """Pages that requests read."""
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) if there are too few.

        Free pages go first; then the least recently used idle pages are evicted.
        """
        if count > self.num_available:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page of a request, given in token order.

        Later pages are let go first, so that a prefix is evicted from its end.
        """
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def reuse(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix of `keys`, each with one reference more."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._references[page] += 1
            self._idle.pop(page, None)
            pages.append(page)
        return pages

    def publish(self, page: int, key: bytes) -> None:
        """Let others find an owned, full page by its key; the first page of a key stays."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
