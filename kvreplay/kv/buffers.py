"""KV contents: one 64-bit word per token slot, in torch tensors that share numpy's memory.

A word is the fingerprint of (prefix, position, group). Whoever computes a token after reading something wrong writes
a wrong word too. Nothing here knows requests: the worker model says who writes and reads what.
"""

from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np

from kvreplay.kv.allocation import words_and_tensor
from kvreplay.kv.block_rows import BlockRows, Positions, rows_of_groups, words_per_block
from kvreplay.kv.content import Content, WordArray
from kvreplay.kv.memory import BlockIds as AnyBlockIds
from kvreplay.kv.memory import History, Provenance
from kvreplay.kv.prefix_cache import BlockIds
from kvreplay.kv.specs import KVCacheGroupSpec

GROUPS_PER_SHARE: Final = 1 << 10
"""A share of the heads has its own words, as a group has: share s of group g counts as group g + s * this."""
_GROUP_STEP = 0x9E3779B97F4A7C15
_TAINT_STEP = 0xD1B54A32D192ED03
_MASK = (1 << 64) - 1


@cache
def _group_words(first_group: int, num_groups: int) -> WordArray:
    """What a group adds to a fingerprint, of shape [groups, 1]."""
    groups = np.arange(first_group, first_group + num_groups, dtype=np.uint64)
    return groups[:, None] * np.uint64(_GROUP_STEP)


class KVBuffers:
    """The blocks of one rank, over all groups: `tensor` has shape [num_blocks, words of the widest group], int64.

    `blocks`: the groups, or the block size that any group has. Fresh memory holds zeros, which are nobody's contents.
    """

    def __init__(self, num_blocks: int, blocks: int | Sequence[KVCacheGroupSpec]) -> None:
        width = blocks if isinstance(blocks, int) else max(words_per_block(spec) for spec in blocks)
        self.num_blocks = num_blocks
        self.words, self.tensor = words_and_tensor(num_blocks, width)
        self.rows: list[BlockRows] = (
            [BlockRows(self.words, blocks)] if isinstance(blocks, int) else rows_of_groups(self.words, blocks)
        )
        self._is_uniform = isinstance(blocks, int)
        self._last_words: tuple[Content | None, int, int, WordArray] = (None, 0, 0, np.zeros(0, np.uint64))
        self.provenance: dict[int, Provenance] = {}
        """Blocks whose words a fault has changed, or that were written by someone without the right to."""
        self.origins: dict[int, object] = {}
        """Blocks that somebody has read wrong contents from, or has written after that → where it began."""

    def rows_of(self, group: int) -> BlockRows:
        return self.rows[0 if self._is_uniform else group % GROUPS_PER_SHARE]

    # -- computed tokens --------------------------------------------------------------------------------------

    def write(self, table: BlockIds, content: Content, group: int, start: int, end: int, taint: int = 0) -> bool:
        """Tokens [start, end) are computed into the blocks of `table`; wrongly if `taint` is not 0.

        Returns whether the null block was among them.
        """
        words = self._expected(content, group, start, end)
        if taint:
            words = words + np.uint64(taint * _TAINT_STEP & _MASK | 1)
        rows = self.rows_of(group)
        if self.provenance or self.origins:
            first, last = rows.renewed(start, end)
            self._forget_history(table[first:last])
        return rows.put(table, words, start, end)

    def write_alike(self, tables: Sequence[BlockIds], content: Content, first_group: int, start: int, end: int) -> None:
        """`write` into groups from `first_group` on that differ in nothing but their blocks, none of which is null."""
        rows = self.rows_of(first_group)
        words = self._expected(content, 0, start, end) + _group_words(first_group, len(tables))
        first, last = rows.places(start, end)
        blocks = np.stack([table[first:last] for table in tables])
        if self.provenance or self.origins:
            self._forget_history(blocks[:, rows.renewed(start, end)[0] - first :].ravel())
        rows.put_alike(blocks, words, start, end)

    def write_rejected(self, table: BlockIds, group: int, start: int, end: int) -> None:
        """Drafts at [start, end) were wrong: what is there now is nobody's contents, until it is written again."""
        words = np.arange(start, end, dtype=np.uint64) * np.uint64(_TAINT_STEP) + np.uint64(group + 1)
        self.rows_of(group).put(table, words, start, end)

    def wrong_positions(self, table: BlockIds, content: Content, group: int, start: int, end: int) -> Positions | None:
        """Positions in [start, end) whose words are not what right contents give; None if all are right."""
        return self.rows_of(group).differing(table, self._expected(content, group, start, end), start, end)

    def taint_of(self, table: BlockIds, positions: Positions, group: int = 0) -> int:
        """A digest of the wrong words at these positions, never 0."""
        words = self.rows_of(group).at(table, positions)
        mixed = np.bitwise_xor.reduce(words * (positions.astype(np.uint64) * np.uint64(2) + np.uint64(1)))
        return int(mixed) | 1

    def _expected(self, content: Content, group: int, start: int, end: int) -> WordArray:
        if self._is_uniform or len(self.rows) == 1:
            words = content.fingerprints(start, end)
        else:
            words = self._shared_words(content, start, end)
        if group:
            words = words + np.uint64(group * _GROUP_STEP & _MASK)
        return words

    def _shared_words(self, content: Content, start: int, end: int) -> WordArray:
        """Groups ask one after the other for the same tokens."""
        last, last_start, last_end, words = self._last_words
        if last is content and last_start == start and last_end == end:
            return words
        words = content.fingerprints(start, end)
        self._last_words = (content, start, end, words)
        return words

    def _forget_history(self, block_ids: BlockIds) -> None:
        for block_id in block_ids.tolist():
            self.origins.pop(block_id, None)
            self.provenance.pop(block_id, None)

    def histories(self, block_ids: AnyBlockIds) -> dict[int, History]:
        """Of these blocks those whose contents somebody is to blame for."""
        if not (self.provenance or self.origins):
            return {}
        provenance, origins = self.provenance, self.origins
        return {
            block_id: History(provenance.get(block_id), origins.get(block_id))
            for block_id in map(int, block_ids)
            if block_id in provenance or block_id in origins
        }

    def set_history(self, block_id: int, history: History) -> None:
        if history.provenance is not None:
            self.provenance[block_id] = history.provenance
        if history.origin is not None:
            self.origins[block_id] = history.origin

    # -- whole blocks -----------------------------------------------------------------------------------------

    def read_blocks(self, group: int, block_ids: AnyBlockIds) -> WordArray:
        """The blocks' words now, as a copy of shape [number of blocks, words of the group's block]."""
        return self.rows_of(group).read(np.asarray(block_ids, np.int64))

    def write_blocks(self, group: int, block_ids: AnyBlockIds, words: WordArray) -> None:
        ids = np.asarray(block_ids, np.int64)
        self._put(group, ids, words)
        if self.provenance or self.origins:
            self._forget_history(ids)

    def begin_load(self, block_ids: BlockIds) -> None:
        """A transfer into these blocks begins: what an earlier owner has left in them is nobody's fault any more.

        Where nothing arrives, that is a mistake of its own.
        """
        if self.provenance or self.origins:
            self._forget_history(block_ids)

    def _put(self, group: int, block_ids: BlockIds, words: WordArray) -> None:
        self.rows_of(group).overwrite(block_ids, words)

    def zero(self, block_ids: AnyBlockIds) -> None:
        """Blocks of any group are emptied, so that nobody reads what an earlier owner has left in them."""
        ids = np.asarray(block_ids, np.int64)
        self.words[ids] = 0
        self._forget_history(ids)

    def copy_block(self, source: int, target: int) -> None:
        """Whatever is in it, and whoever is to blame for that."""
        self.words[target] = self.words[source]
        self._forget_history(np.array([target], np.int64))
        if source in self.provenance:
            self.provenance[target] = self.provenance[source]
        if source in self.origins:
            self.origins[target] = self.origins[source]
