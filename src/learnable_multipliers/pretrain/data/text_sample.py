"""A bounded sample of text that depends on which texts there are, not on where they stand.

Texts are cut into pieces, and a hash of a piece decides whether it is kept: the smallest hashes
are. So the sample comes from all over a corpus, also from all over one long text; neither sorting
nor the order of files changes it; and one pass over a stream that cannot be wound back is enough.
Equal pieces count once: a page that is there a thousand times would else be taken a thousand times
or never.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator

# Small beside any sample, so that even one long text gives pieces from all over it.
_PIECE = 1 << 12


class TextSample:
    """Keeps the pieces with the smallest hashes, `num_characters` of them in all."""

    def __init__(self, num_characters: int) -> None:
        self._num_characters = num_characters
        self._by_hash: dict[int, str] = {}
        # A heap gives its smallest: with the signs turned, the largest hash, the first to go.
        self._largest: list[int] = []
        self._kept = 0
        # Hashes from here on are out for good. If a small piece could slip in where a large one
        # had to go, the sample would depend on the order.
        self._bound = 1 << 128

    def add(self, text: str) -> None:
        """Let the pieces of a text into the sample if their hashes are small enough."""
        for piece in _pieces(text):
            found = _hash(piece)
            if found < self._bound and found not in self._by_hash:
                self._keep(found, piece)

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces by their hashes; the last one is cut where the sample is full."""
        left = self._num_characters
        for found in sorted(self._by_hash):
            piece = self._by_hash[found][:left]
            left -= len(piece)
            yield piece

    def _keep(self, found: int, piece: str) -> None:
        self._by_hash[found] = piece
        heapq.heappush(self._largest, -found)
        self._kept += len(piece)
        while self._kept - len(self._by_hash[-self._largest[0]]) >= self._num_characters:
            self._bound = -heapq.heappop(self._largest)
            self._kept -= len(self._by_hash.pop(self._bound))


def _pieces(text: str) -> Iterator[str]:
    """Cut a text, behind the end of a line where there is one, so that few words are torn."""
    start = 0
    while start < len(text):
        stop = start + _PIECE
        if stop < len(text):
            stop = text.rfind("\n", start + _PIECE // 2, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
