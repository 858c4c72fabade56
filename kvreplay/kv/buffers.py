"""KV contents: one 64-bit word per token slot, in torch tensors that share numpy's memory.

A word is the fingerprint of (prefix, position, group). Whoever computes a token after reading something wrong writes
a wrong word too. Nothing here knows requests: the worker model says who writes and reads what.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvreplay.kv.block_pool import BlockIds
from kvreplay.kv.content import Content, WordArray
from kvreplay.kv.memory import BlockIds as AnyBlockIds
from kvreplay.kv.memory import Provenance

if TYPE_CHECKING:
    from torch import Tensor

_GROUP_STEP = 0x9E3779B97F4A7C15
_TAINT_STEP = 0xD1B54A32D192ED03
_MASK = (1 << 64) - 1


class KVBuffers:
    """The blocks of one rank, over all groups: `tensor` has shape [num_blocks, block_size], int64.

    Fresh memory holds zeros, which are nobody's contents.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.block_size = block_size
        self.tensor: Tensor = torch.zeros((num_blocks, block_size), dtype=torch.int64)
        self.words: WordArray = self.tensor.numpy().view(np.uint64)
        # A block as one item: numpy then copies whole blocks instead of word after word.
        self._row = np.dtype((np.void, 8 * block_size))
        self._rows = self.words.view(self._row).ravel()
        self.provenance: dict[int, Provenance] = {}
        """Blocks whose words a fault has changed, or that were written by someone without the right to."""
        self.derived: dict[int, int] = {}
        """Blocks written by someone who had read wrong contents → the block that was wrong first."""
        self.reported: set[int] = set()
        """Wrong blocks that a finding has named; forgotten when they are written again."""

    # -- computed tokens --------------------------------------------------------------------------------------

    def write(self, table: BlockIds, content: Content, group: int, start: int, end: int, taint: int = 0) -> None:
        """Tokens [start, end) are computed into the blocks of `table`; wrongly if `taint` is not 0."""
        words = self._expected(content, group, start, end)
        if taint:
            words = words + np.uint64(taint * _TAINT_STEP & _MASK | 1)
        size = self.block_size
        first, last = start // size, -(-end // size)
        head, tail = start % size, end % size
        if self.provenance or self.derived or self.reported:
            # A block that is only written on keeps what is wrong before that.
            self._forget_history(table[first + 1 if head else first : last])
        if head or tail:
            if last - first == 1:
                self.words[table[first], head : head + len(words)] = words
                return
            if head:
                self.words[table[first], head:] = words[: size - head]
                words = words[size - head :]
                first += 1
            if tail:
                last -= 1
                self.words[table[last], :tail] = words[len(words) - tail :]
                words = words[: len(words) - tail]
        if first < last:
            self._rows[table[first:last]] = words.view(self._row)

    def wrong_positions(
        self, table: BlockIds, content: Content, group: int, start: int, end: int
    ) -> NDArray[np.int64] | None:
        """Positions in [start, end) whose words are not what right contents give; None if all are right."""
        expected = self._expected(content, group, start, end)
        first, last = start // self.block_size, -(-end // self.block_size)
        found = self._rows.take(table[first:last]).view(np.uint64)
        head = start - first * self.block_size
        differs = found[head : head + (end - start)] != expected
        if not differs.any():
            return None
        positions: NDArray[np.int64] = differs.nonzero()[0] + start
        return positions

    def taint_of(self, table: BlockIds, positions: NDArray[np.int64]) -> int:
        """A digest of the wrong words at these positions, never 0."""
        words = self.words[table[positions // self.block_size], positions % self.block_size]
        mixed = np.bitwise_xor.reduce(words * (positions.astype(np.uint64) * np.uint64(2) + np.uint64(1)))
        return int(mixed) | 1

    @staticmethod
    def _expected(content: Content, group: int, start: int, end: int) -> WordArray:
        words = content.fingerprints(start, end)
        if group:
            words = words + np.uint64(group * _GROUP_STEP & _MASK)
        return words

    def _forget_history(self, block_ids: BlockIds) -> None:
        for block_id in block_ids.tolist():
            self.reported.discard(block_id)
            self.provenance.pop(block_id, None)
            self.derived.pop(block_id, None)

    # -- transfers --------------------------------------------------------------------------------------------

    def read_blocks(self, group: int, block_ids: AnyBlockIds) -> WordArray:
        """The blocks' words now, as a copy of shape [number of blocks, block size]."""
        copy: WordArray = self._rows.take(np.asarray(block_ids, np.int64)).view(np.uint64)
        return copy.reshape(-1, self.block_size)

    def write_blocks(self, group: int, block_ids: AnyBlockIds, words: WordArray) -> None:
        ids = np.asarray(block_ids, np.int64)
        self._put(ids, words)
        if self.provenance or self.derived or self.reported:
            self._forget_history(ids)

    def begin_load(self, block_ids: BlockIds) -> None:
        """A transfer into these blocks begins: whole rows arrive, so there is nothing to prepare."""

    def _put(self, block_ids: NDArray[np.int64], words: WordArray) -> None:
        self._rows[block_ids] = np.ascontiguousarray(words).view(self._row).ravel()
