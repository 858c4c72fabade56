"""Block tables as the scheduler showed them to the connector, from what a step records."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvreplay.conformance.offload_workload import LoadRow, RecordedStep, Tables
from kvreplay.connectors.offloading.layout import OffloadGroup, OffloadLayout
from kvreplay.connectors.offloading.worker import SYNC_LOADS


@dataclass(slots=True)
class TableBlocks:
    """A request's tables, and per group the blocks that have no hash."""

    tables: Tables
    unhashed: Tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(self.tables)

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        return tuple(self.unhashed)


def hashed_blocks(tables: Tables) -> TableBlocks:
    """Blocks of a request that runs in this step: they have been hashed with it."""
    return TableBlocks(tables, [[] for _ in tables])


def blocks_of_load(
    step: RecordedStep, row: LoadRow, local: int, admitted: Tables | None, sizes: list[int]
) -> TableBlocks:
    """`admitted`: the table of a request that runs at once; `sizes`: tokens of a block, by group.

    An asynchronous load's table is the one that the request has at the end of the step, and from the local tokens on
    it has no hashes. A step that killed the engine has no end; then the load's own row must do.
    """
    if row.queue == SYNC_LOADS:
        return hashed_blocks(admitted if admitted is not None else list(_filled(row)))
    after = step.after.req.get(row.request_id)
    tables = after.tables if after is not None else list(_filled(row))
    return TableBlocks(tables, [_real(table[-(-local // size) :]) for table, size in zip(tables, sizes, strict=True)])


def _filled(row: LoadRow) -> Iterator[list[int]]:
    """Per group: nothing up to the first block of the load, then its blocks."""
    start = 0
    for size, index in zip(row.group_sizes, row.block_indices, strict=True):
        yield [0] * index + row.block_ids[start : start + size]
        start += size


def fresh_blocks(layout: OffloadLayout, num_groups: int, end: int) -> TableBlocks:
    """A table for `end` tokens as the core would make it, ids made up: of windows only the last blocks are real."""
    tables: Tables = [[] for _ in range(num_groups)]
    next_id = 1
    for group in layout.groups:
        num_blocks = -(-end // group.tokens_per_block)
        num_real = min(_window_blocks(group, num_blocks), num_blocks)
        tables[group.group_id] = [0] * (num_blocks - num_real) + list(range(next_id, next_id + num_real))
        next_id += num_real
    return TableBlocks(tables, [_real(table) for table in tables])


def _window_blocks(group: OffloadGroup, num_blocks: int) -> int:
    return group.window_chunks * group.blocks_per_chunk if group.is_windowed else num_blocks


def _real(table: list[int]) -> list[int]:
    return [block_id for block_id in table if block_id]
