"""Where one KV cache group keeps its words: the pages of all groups are the same memory, each group's its own view.

A token has a word; of compressed attention, every `tokens_per_state` tokens have one; a Mamba block has one for the
whole prefix up to the token whose state it holds.
"""

from collections.abc import Sequence

import numpy as np
from numpy import count_nonzero  # on truth values several times as fast as `any`
from numpy.typing import NDArray

from kvreplay.kv.content import WordArray
from kvreplay.kv.prefix_cache import BlockIds
from kvreplay.kv.specs import CIRCULAR_BUFFER, MAMBA, KVCacheGroupSpec, cdiv

Positions = NDArray[np.int64]


def words_per_block(spec: KVCacheGroupSpec) -> int:
    return 1 if spec.kind == MAMBA else spec.block_size // _unit_of(spec)


def _unit_of(spec: KVCacheGroupSpec) -> int:
    """Tokens of one word. A state that would reach into the next block is kept token by token."""
    return 1 if spec.block_size % spec.tokens_per_state else spec.tokens_per_state


class BlockRows:
    """One word per `unit` tokens: attention. `pages` has shape [number of blocks, words of the widest group].

    A word is written when the last of its tokens is computed. `has_nulls`: tables may have null blocks.
    """

    def __init__(self, pages: WordArray, block_size: int, *, unit: int = 1, has_nulls: bool = False) -> None:
        self.block_size = block_size
        self.num_words = block_size // unit
        self.has_nulls = has_nulls
        self._unit = unit
        self.words: WordArray = pages[:, : self.num_words]
        # A block as one item: numpy then copies whole blocks instead of word after word.
        self._row = np.dtype((np.void, 8 * self.num_words))
        self._rows: NDArray[np.void] = np.ndarray(len(pages), self._row, pages.data, strides=(8 * pages.shape[1],))
        self._is_packed = pages.shape[1] == self.num_words

    # -- by position ------------------------------------------------------------------------------------------

    def put(self, table: BlockIds, words: WordArray, start: int, end: int) -> bool:
        """Tokens [start, end) have `words`. Returns whether some went into the null block."""
        if self._unit != 1:
            words, start, end = self._in_units(words, start, end)
            if start == end:
                return False
        size = self.num_words
        first, last = start // size, -(-end // size)
        hits_null = self.has_nulls and not table[first:last].all()
        head, tail = start % size, end % size
        if head or tail:
            if last - first == 1:
                self.words[table[first], head : head + len(words)] = words
                return hits_null
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
        return hits_null

    def put_alike(self, blocks: NDArray[np.int64], words: WordArray, start: int, end: int) -> None:
        """Tokens [start, end) of several groups have `words` (shape [groups, tokens]), in `blocks` (shape [groups,
        blocks], from the one of `start` on)."""
        size = self.num_words
        if self._unit != 1:
            before = start // self.block_size * self.block_size  # `put` counts places from a table's beginning
            for table, row in zip(blocks, words, strict=True):
                self.put(table, row, start - before, end - before)
            return
        head, tail = start % size, end % size
        if head and blocks.shape[1] == 1:
            self.words[blocks[:, 0], head : head + words.shape[1]] = words
            return
        if head:
            self.words[blocks[:, 0], head:] = words[:, : size - head]
            blocks, words = blocks[:, 1:], words[:, size - head :]
        if tail:
            self.words[blocks[:, -1], :tail] = words[:, words.shape[1] - tail :]
            blocks, words = blocks[:, :-1], words[:, : words.shape[1] - tail]
        if blocks.shape[1]:
            self._rows[blocks.ravel()] = np.ascontiguousarray(words).reshape(-1).view(self._row)

    def differing(self, table: BlockIds, expected: WordArray, start: int, end: int) -> Positions | None:
        """Of tokens [start, end), the first of each word that is not as expected; None if all are."""
        if self._unit != 1:
            expected, start, end = self._in_units(expected, start, end)
        size = self.num_words
        first, last = start // size, -(-end // size)
        found = self._of(table[first:last])
        head = start - first * size
        differs = found[head : head + (end - start)] != expected
        if not count_nonzero(differs):
            return None
        positions: Positions = (differs.nonzero()[0] + start) * self._unit
        return positions

    def at(self, table: BlockIds, positions: Positions) -> WordArray:
        found: WordArray = self.words[table[positions // self.block_size], positions % self.block_size // self._unit]
        return found

    def places_of(self, positions: Positions) -> Positions:
        """Where in a table the word of each of these tokens is."""
        return positions // self.block_size

    def places(self, start: int, end: int) -> tuple[int, int]:
        """Where in a table the words of tokens [start, end) are."""
        return start // self.block_size, cdiv(end, self.block_size)

    def renewed(self, start: int, end: int) -> tuple[int, int]:
        """Where in a table writing these tokens leaves nothing of what was there. Of a block that is only written on,
        what is before that stays."""
        first, last = self.places(start, end)
        return (first + 1, last) if start % self.block_size else (first, last)

    def _in_units(self, words: WordArray, start: int, end: int) -> tuple[WordArray, int, int]:
        """Words that are complete with one of these tokens."""
        unit = self._unit
        first, last = start // unit, end // unit
        return np.ascontiguousarray(words[(first + 1) * unit - 1 - start :: unit][: last - first]), first, last

    # -- by block ---------------------------------------------------------------------------------------------

    def read(self, block_ids: BlockIds) -> WordArray:
        """As a copy of shape [number of blocks, words of a block]."""
        return self._of(block_ids).reshape(-1, self.num_words)

    def overwrite(self, block_ids: BlockIds, words: WordArray) -> None:
        self._rows[block_ids] = np.ascontiguousarray(words).view(self._row).ravel()

    def _of(self, block_ids: BlockIds) -> WordArray:
        # `take` is the faster one, but copies all of an array that is not packed.
        rows = self._rows.take(block_ids) if self._is_packed else self._rows[block_ids]
        words: WordArray = rows.view(np.uint64)
        return words


class StateRows(BlockRows):
    """Mamba: a block holds the state after a prefix. Of tokens [start, end) only the state after `end` is kept."""

    def __init__(self, pages: WordArray, block_size: int) -> None:
        super().__init__(pages, 1, has_nulls=True)
        self.block_size = block_size

    def put(self, table: BlockIds, words: WordArray, start: int, end: int) -> bool:
        block_id = table[(end - 1) // self.block_size]
        self.words[block_id, 0] = words[-1]
        return not block_id

    def differing(self, table: BlockIds, expected: WordArray, start: int, end: int) -> Positions | None:
        """Whether the state after `end` tokens, which the next token goes on from, is not as expected."""
        if self.words[table[(end - 1) // self.block_size], 0] == expected[-1]:
            return None
        return np.array([end - 1], np.int64)

    def at(self, table: BlockIds, positions: Positions) -> WordArray:
        found: WordArray = self.words[table[positions // self.block_size], 0]
        return found

    def places(self, start: int, end: int) -> tuple[int, int]:
        last = (end - 1) // self.block_size
        return last, last + 1

    def renewed(self, start: int, end: int) -> tuple[int, int]:
        return self.places(start, end)


class ScratchRows(BlockRows):
    """A circular buffer: one block for all tokens, each in the place of an earlier one."""

    def put(self, table: BlockIds, words: WordArray, start: int, end: int) -> bool:
        kept = min(end - start, self.num_words)
        self.words[table[0], np.arange(end - kept, end) % self.num_words] = words[len(words) - kept :]
        return not table[0]

    def differing(self, table: BlockIds, expected: WordArray, start: int, end: int) -> Positions | None:
        """Of the last tokens before `end`, as many as there is room for, those whose words are not as expected."""
        positions: Positions = np.arange(max(start, end - self.num_words), end)
        differs = self.at(table, positions) != expected[len(expected) - len(positions) :]
        return positions[differs] if differs.any() else None

    def at(self, table: BlockIds, positions: Positions) -> WordArray:
        found: WordArray = self.words[table[0], positions % self.num_words]
        return found

    def places_of(self, positions: Positions) -> Positions:
        return np.zeros_like(positions)

    def places(self, start: int, end: int) -> tuple[int, int]:
        return 0, 1

    def renewed(self, start: int, end: int) -> tuple[int, int]:
        return (0, 1) if end - start >= self.num_words else (0, 0)


def rows_of_groups(pages: WordArray, groups: Sequence[KVCacheGroupSpec]) -> list[BlockRows]:
    return [_rows_of(pages, spec) for spec in groups]


def _rows_of(pages: WordArray, spec: KVCacheGroupSpec) -> BlockRows:
    if spec.kind == MAMBA:
        return StateRows(pages, spec.block_size)
    if spec.kind == CIRCULAR_BUFFER:
        return ScratchRows(pages, spec.block_size, has_nulls=True)
    return BlockRows(pages, spec.block_size, unit=_unit_of(spec), has_nulls=not spec.is_full_attention)
