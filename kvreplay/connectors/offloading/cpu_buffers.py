"""One rank's share of the CPU tier's memory: a row of words for each block of each chunk.

A torch tensor that shares numpy's memory, as `kv.buffers` has for the GPU. Places that a fault has damaged are
remembered, so that whoever reads them can name it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.offloading.arrays import Mask
from kvreplay.kv.allocation import words_and_tensor
from kvreplay.kv.content import WordArray
from kvreplay.kv.integrity import checksums
from kvreplay.kv.memory import History

if TYPE_CHECKING:
    from torch import Tensor

Places = NDArray[np.int64]
"""Of blocks in the tier: chunk * blocks per chunk + place in it."""


class ChunkContents(NamedTuple):
    """One chunk on one rank, taken out of the tier's memory."""

    words: WordArray
    sums: WordArray
    damage: Mapping[int, History]
    """By place within the chunk."""


class CpuBuffers:
    """`num_words`: of the widest group's block; 0 where contents are not checked. `keeps_sums`: checksums are kept."""

    def __init__(self, num_chunks: int, blocks_per_chunk: int, num_words: int, *, keeps_sums: bool) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.tensor: Tensor | None = None
        self._words: WordArray = np.zeros((num_chunks * blocks_per_chunk, 0), np.uint64)
        if num_words:
            self._words, self.tensor = words_and_tensor(num_chunks * blocks_per_chunk, num_words)
        # A block as one item: numpy then copies whole blocks instead of word after word.
        self._row = np.dtype((np.void, 8 * max(num_words, 1)))
        self._rows: NDArray[np.void] | None = self._words.view(self._row).reshape(-1) if num_words else None
        self._keeps_sums = keeps_sums
        self._sums = np.zeros(num_chunks * blocks_per_chunk, np.uint64)
        """What the words of each block should add up to."""
        self.damaged: dict[int, History] = {}
        """Places that are known to hold wrong words."""

    def write(self, places: Places, words: WordArray, *, sent: WordArray) -> None:
        """Overwrite blocks. `sent`: the words as the sender had them, which the checksums are of."""
        if self._rows is not None and words.shape[1] == self._words.shape[1]:
            self._rows[places] = np.ascontiguousarray(words).view(self._row).reshape(-1)
        elif len(places) == 1:
            self._words[places.item(), : words.shape[1]] = words[0]
        else:
            self._words[places, : words.shape[1]] = words
        if self._keeps_sums:
            self._sums[places] = checksums(sent)
        if self.damaged:
            for place in places.tolist():
                self.damaged.pop(place, None)

    def read(self, places: Places, num_words: int) -> WordArray:
        """A copy of shape [number of blocks, number of words]."""
        if self._rows is not None and num_words == self._words.shape[1]:
            whole: WordArray = self._rows.take(places).view(np.uint64).reshape(-1, num_words)
            return whole
        copy: WordArray = self._words[places, :num_words]
        return copy

    def matches(self, places: Places, words: WordArray) -> Mask:
        """Which of these blocks are what was stored. Without contents, those that nothing is known to have damaged."""
        if words.shape[1]:
            same: Mask = checksums(words) == self._sums[places]
            return same
        return np.array([place not in self.damaged for place in places.tolist()], np.bool_)

    # -- whole chunks, for other tiers ------------------------------------------------------------------------

    def take_chunk(self, chunk_id: int) -> ChunkContents:
        first, end = self._span(chunk_id)
        damage = {place - first: source for place, source in self.damaged.items() if first <= place < end}
        return ChunkContents(self._words[first:end].copy(), self._sums[first:end].copy(), damage)

    def put_chunk(self, chunk_id: int, contents: ChunkContents) -> None:
        first, end = self._span(chunk_id)
        self._words[first:end] = contents.words
        self._sums[first:end] = contents.sums
        for place in range(first, end):
            self.damaged.pop(place, None)
        self.damaged.update((first + index, source) for index, source in contents.damage.items())

    def _span(self, chunk_id: int) -> tuple[int, int]:
        return chunk_id * self.blocks_per_chunk, (chunk_id + 1) * self.blocks_per_chunk
