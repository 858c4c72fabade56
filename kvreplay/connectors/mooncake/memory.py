"""A rank's registered memory: regions of blocks, wherever their bytes really are.

An engine write names bytes of a region's blocks. A replay keeps words instead, a row of them per block: a region is
then a range of columns, and a part of its bytes the same part of its columns.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from kvreplay.connectors.mooncake.regions import Region
from kvreplay.kv.memory import BlockIds, KVMemory, Provenance

Contents: TypeAlias = NDArray[Any]
"""One row per block: words, or bytes."""


class UnregisteredMemoryError(Exception):
    """A region that this rank has not registered: the transfer engine refuses to write there."""


class RankMemory(Protocol):
    """What a rank's transfer engine reads and writes. `offset` and `length` are payload bytes of each block."""

    def read(self, region: Region, block_ids: BlockIds, offset: int, length: int) -> Contents:
        """The bytes as they are now, as a copy."""
        ...

    def write(
        self,
        region: Region,
        block_ids: BlockIds,
        offset: int,
        length: int,
        contents: Contents,
        *,
        provenance: Provenance | None,
    ) -> None:
        """Overwrite them. `provenance`: for whom they are. Raises UnregisteredMemoryError."""
        ...

    def mark_corrupted(self, region: Region, block_id: int, provenance: Provenance) -> None:
        """A fault has changed what was just written to this block."""
        ...


class Columns(NamedTuple):
    """Where a region is in its blocks' rows."""

    start: int
    length: int


class RowMemory:
    """Regions as columns of a memory that knows rows only. `columns`: by address; None: each region is whole rows."""

    def __init__(self, memory: KVMemory, columns: Mapping[int, Columns] | None = None) -> None:
        self._memory = memory
        self._columns = columns

    def read(self, region: Region, block_ids: BlockIds, offset: int, length: int) -> Contents:
        words = self._memory.read_blocks(region.group_index, block_ids)
        place = self._place(region, offset, length)
        return words if place is None else words[:, place]

    def write(
        self,
        region: Region,
        block_ids: BlockIds,
        offset: int,
        length: int,
        contents: Contents,
        *,
        provenance: Provenance | None,
    ) -> None:
        place = self._place(region, offset, length)
        if place is None:
            words = contents
        else:
            words = self._memory.read_blocks(region.group_index, block_ids)
            words[:, place] = contents
        self._memory.write_blocks(region.group_index, block_ids, words, provenance=provenance)

    def mark_corrupted(self, region: Region, block_id: int, provenance: Provenance) -> None:
        self._memory.mark_corrupted(block_id, provenance)

    def _place(self, region: Region, offset: int, length: int) -> slice | None:
        """The columns of these bytes; None: all."""
        if self._columns is None:
            return None
        columns = self._columns.get(region.base_addr)
        if columns is None:
            raise UnregisteredMemoryError(hex(region.base_addr))
        start, remainder = divmod(offset * columns.length, region.kv_block_len)
        count, rest = divmod(length * columns.length, region.kv_block_len)
        assert not remainder, f"bytes [{offset}, +{length}) of {region.kv_block_len} start inside a word"
        assert not rest, f"bytes [{offset}, +{length}) of {region.kv_block_len} end inside a word"
        return slice(columns.start + start, columns.start + start + count)
